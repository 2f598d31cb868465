"""A job between its claim and its end, in this process."""

from __future__ import annotations

import datetime as dt
import enum
import time
from typing import Any

from .. import cancel
from .claims import ClaimedJob
from .options import JobOptions
from .outcomes import Ending, Outcome


class Asked(enum.Enum):
    """Who asked the handler to stop."""

    CANCEL = "cancel"
    """Somebody cancelled the job: it ends as cancelled."""
    SHUTDOWN = "shutdown"
    LEASE_LOST = "lease_lost"


class RunningJob:
    """One attempt: the claim, the token, and who cancelled it.

    `finish` may be called by the handler's thread and by a worker that gives up waiting:
    the first call counts.
    """

    __slots__ = ("_asked", "_finished", "_token", "begun", "claimed", "progress", "since", "token")

    def __init__(self, claimed: ClaimedJob) -> None:
        self.claimed = claimed
        self.since = time.monotonic()
        """When it began to wait in this worker."""
        self.begun = claimed.has_begun
        """Whether the database has counted the attempt."""
        self._token = cancel.new()
        self.token = self._token
        # What the handler reported last; written by the completer.
        self.progress: tuple[float, str] | None = None
        # `setdefault` on a dict is atomic: whoever is first decides.
        self._asked: dict[str, Asked] = {}
        self._finished: dict[str, Outcome] = {}

    def begin(self, at: dt.datetime) -> None:
        """Note that the attempt is counted, at the time `at`."""
        self.begun = True
        self.claimed.attempted_at = at
        if self.claimed.started_at is None:
            self.claimed.started_at = at

    @property
    def is_last(self) -> bool:
        """Whether the job may not be attempted again after this."""
        return self.claimed.attempt >= self.claimed.max_attempts

    @property
    def may_be_counted_ahead(self) -> bool:
        """Whether its attempt may be counted before there is a slot: see `begins.py`."""
        return self.claimed.attempt == 1 < self.claimed.max_attempts

    def start_clock(self) -> None:
        """Let the job's timeout, if it has one, run from now."""
        if "timeout" not in self.claimed.options:
            return  # in a hundredth of the time that it takes to read them
        timeout = JobOptions.stored_in(self.claimed.options).timeout
        if timeout is not None:
            self.token = self._token.with_deadline(timeout, kind="timeout")

    def ask(self, who: Asked, reason: str | None, kind: str | None = None) -> None:
        """Cancel the handler's token. The first who asks decides what a stop means.

        `kind`: of a cancel request; the worker's own are named as they are.
        """
        self._asked.setdefault("who", who)
        self._token.cancel(reason, kind or who.value)

    @property
    def asked(self) -> Asked | None:
        """Who asked first, if anybody did."""
        return self._asked.get("who")

    @property
    def timed_out(self) -> bool:
        """Whether the token was cancelled by the deadline alone."""
        return self.token.cancelled and not self._token.cancelled

    @property
    def finished(self) -> bool:
        """Whether the attempt has an outcome."""
        return bool(self._finished)

    @property
    def outcome(self) -> Outcome | None:
        """The outcome that counts, once there is one."""
        return self._finished.get("first")

    def finish(
        self,
        ending: Ending,
        *,
        at: dt.datetime,
        result: str | None = None,
        error: dict[str, Any] | None = None,
        exception: BaseException | None = None,
        reason: str | None = None,
        kind: str = "",
    ) -> Outcome | None:
        """Return the outcome to write; None if the attempt has one already."""
        claimed = self.claimed
        mine = Outcome(
            id=claimed.id,
            queue=claimed.queue,
            task_path=claimed.task_path,
            fence=claimed.fence,
            attempt=claimed.attempt,
            max_attempts=claimed.max_attempts,
            ending=ending,
            begun=self.begun,
            at=at,
            options=claimed.options,
            errors=claimed.errors,
            result=result,
            error=error,
            reason=reason,
            kind=kind,
            by_worker=self.asked in {Asked.SHUTDOWN, Asked.LEASE_LOST},
            progress=self.progress,
            claimed=claimed,
            exception=exception,
        )
        return mine if self._finished.setdefault("first", mine) is mine else None
