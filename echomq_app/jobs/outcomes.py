"""How an attempt ended, and what becomes of the job: the rules, without any I/O.

A handler may return, raise, or stop because its token said so; a worker may give a job
up because it shuts down; a worker may be gone. Whether somebody asked to cancel the job
is read from the database when the ending is written, not from what the worker happened
to know.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import random
import traceback
from collections.abc import Callable
from typing import Any

from ..core.ids import JobId
from ..core.payload import storable
from ..models.job import JobState
from . import journal
from .claims import ClaimedJob
from .journal import Entry
from .options import JobOptions

MESSAGE_MAX = 2_000
REASON_MAX = 65_536
"""Characters of a reason that a handler gives itself."""
TRACEBACK_MAX = 16_000
ERRORS_MAX = 25
"""How many errors a job keeps: the newest."""


class Ending(enum.Enum):
    """How an attempt ended."""

    RETURNED = enum.auto()
    RAISED = enum.auto()
    STOPPED = enum.auto()
    """The handler raised JobCancelled: it stopped because it was asked, or on its own."""
    UNSTORABLE = enum.auto()
    """The handler returned a value that can't be stored. It has done its work: no retry."""
    HANDED_BACK = enum.auto()
    """The worker gives up a job whose handler may still run, or never began: the attempt
    doesn't count."""
    ABANDONED = enum.auto()
    """The worker's lease was lost."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one attempt, or of a claim that led to none. `fence` proves who may write it."""

    id: JobId
    queue: str
    task_path: str
    fence: int
    attempt: int
    max_attempts: int
    ending: Ending
    at: dt.datetime
    claimed: ClaimedJob
    """What the announcement of the job's end is made of."""
    begun: bool = True
    """Whether the attempt was counted, and its start recorded. Else the job only waited in its
    worker: nothing happened to it that its history would tell."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    errors: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    result: str | None = None
    """JSON text of what the handler returned."""
    error: dict[str, Any] | None = None
    reason: str | None = None
    """Why it stopped or was handed back."""
    kind: str = ""
    """Who asked it to stop."""
    by_worker: bool = False
    """STOPPED because the worker asked (shutdown, lease lost), not because somebody
    asked for the job: it is handed back."""
    progress: tuple[float, str] | None = None
    exception: BaseException | None = dataclasses.field(default=None, repr=False, compare=False)
    """What `error` describes, if it was raised in this process."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is written to the job's row, and what is told about it."""

    outcome: Outcome
    state: JobState
    entries: list[Entry]
    attempt: int
    errors: list[dict[str, Any]]
    run_after: dt.datetime | None = None
    """None: as it is."""
    reason: str = ""
    kind: str = ""

    @property
    def finished(self) -> bool:
        return self.state not in {JobState.READY, JobState.SCHEDULED}


def error_record(
    error: BaseException, *, attempt: int, worker: str, at: dt.datetime
) -> dict[str, Any]:
    """Describe an exception so that it can be stored, whatever its text is."""
    kind = type(error)
    try:
        lines = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001
        lines = f"{kind.__qualname__} (its traceback can't be made)"
    return {
        "class": storable(f"{kind.__module__}.{kind.__qualname__}"),
        "message": storable_text(error, MESSAGE_MAX),
        "traceback": _cut(storable(lines), TRACEBACK_MAX),
        "attempt": attempt,
        "worker": storable(worker),
        "at": journal.timestamp(at),
    }


def storable_text(value: object, most: int) -> str:
    """Return the text of anything so that it can be stored: of an error, or a handler's reason."""
    try:
        text = str(value)
    except Exception:  # noqa: BLE001  (a broken __str__ must not lose the failure)
        text = "(its text can't be made)"
    return _cut(storable(text), most)


def decide(
    outcome: Outcome,
    *,
    request: str | None,
    kind: str = "user",
    now: dt.datetime,
    rnd: Callable[[], float] = random.random,
) -> Verdict:
    """Say what becomes of a job. `request`: the reason of a cancel request, None if none.

    `kind`: the request's.
    """
    asked = "" if request is None else kind
    ending = outcome.ending
    if ending is Ending.RETURNED:
        return _finish(outcome, JobState.COMPLETED, journal.COMPLETED, request, asked)
    if ending is Ending.UNSTORABLE:
        return _finish(outcome, JobState.FAILED, journal.FAILED, request, asked)
    stopped = ending is Ending.STOPPED
    if ending is Ending.HANDED_BACK or (stopped and outcome.by_worker and request is None):
        return _again(outcome, outcome.attempt - 1, now, outcome.reason)
    if stopped:
        reason = outcome.reason if request is None else request
        return _finish(
            outcome, JobState.CANCELLED, journal.CANCELLED, reason, asked or outcome.kind
        )
    if ending is Ending.ABANDONED and request is not None:
        return _finish(outcome, JobState.CANCELLED, journal.CANCELLED, request, asked)
    if not outcome.begun and ending is Ending.ABANDONED:
        return _again(outcome, outcome.attempt - 1, now, None)
    if request is not None or outcome.attempt >= outcome.max_attempts:
        return _finish(outcome, JobState.FAILED, journal.FAILED, request, asked)
    if ending is Ending.ABANDONED:
        return _again(outcome, outcome.attempt, now, "the worker's lease was lost")
    delay = JobOptions.stored_in(outcome.options).retry_delay(outcome.attempt, rnd)
    return _again(
        outcome, outcome.attempt, now + dt.timedelta(seconds=delay), None, later=delay > 0
    )


def _finish(
    outcome: Outcome, state: JobState, event: str, reason: str | None, kind: str
) -> Verdict:
    attempt = outcome.attempt if outcome.begun else outcome.attempt - 1
    data = {
        **_common(outcome, state, attempt),
        "reason": reason or None,
        "finished_at": journal.timestamp(outcome.at),
    }
    if kind:
        data["kind"] = kind
    told = {"reason": reason or "", "kind": kind}
    return _verdict(outcome, state, event, data, attempt=attempt, **told)


def _again(
    outcome: Outcome,
    attempt: int,
    run_after: dt.datetime,
    reason: str | None,
    *,
    later: bool = False,
) -> Verdict:
    state = JobState.SCHEDULED if later else JobState.READY
    data = {
        **_common(outcome, state, attempt),
        "reason": reason,
        "run_after": journal.timestamp(run_after),
    }
    return _verdict(
        outcome,
        state,
        journal.RETRYING,
        data,
        attempt=attempt,
        # A job that is ready at once keeps its place in the queue.
        run_after=run_after if later else None,
    )


def _common(outcome: Outcome, state: JobState, attempt: int) -> dict[str, Any]:
    data: dict[str, Any] = {
        "id": str(outcome.id),
        "task": outcome.task_path,
        "state": state.value,
        "attempt": attempt,
        "at": journal.timestamp(outcome.at),
    }
    if outcome.error is not None:
        data["error"] = {name: outcome.error[name] for name in ("class", "message")}
    return data


def _verdict(
    outcome: Outcome, state: JobState, event: str, data: dict[str, Any], **rest: Any
) -> Verdict:
    entries = [Entry(outcome.queue, event, outcome.id, data)]
    if not outcome.begun and event == journal.RETRYING:
        entries = []
    elif outcome.begun and outcome.ending is Ending.ABANDONED:
        entries.insert(0, Entry(outcome.queue, journal.STALLED, outcome.id, data))
    errors = outcome.errors
    if outcome.error is not None:
        errors = [*errors, outcome.error][-ERRORS_MAX:]
    return Verdict(outcome=outcome, state=state, entries=entries, errors=errors, **rest)


def _cut(text: str, longest: int) -> str:
    """Keep the ends: the first lines say where, the last ones what."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
