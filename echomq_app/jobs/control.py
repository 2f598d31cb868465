"""Cancel and retry jobs, pause queues, from anywhere that reaches the database.

    from echomq_app.jobs import control

    control.cancel(result.id, "the user closed the page")    # "requested"

A job that waits is cancelled on the spot. A job that runs is asked: the request is a row
(the memory), the wake-up over the channel layer is only the reflex, and the handler
decides when to stop. Neither waits for the job's row, whoever holds it; only for the end of
another transaction that is asking for the cancel of the same job.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Literal
from uuid import UUID

from django.db import IntegrityError, router, transaction
from django.db.models import F, Q
from django.db.models.functions import Greatest

from .. import engine
from ..core.ids import JobId
from ..core.names import queue_wake_group
from ..core.payload import encode
from ..exceptions import InvalidArgument, InvalidPayload, UnknownJob
from ..models.each import for_each
from ..models.job import ACTIVE, KIND_MAX, CancelRequest, Job, JobState
from ..models.threads import in_database_thread
from ..models.times import now_as_django
from ..models.transactions import after_commit
from . import journal
from .cancelling import CancelAnswer, cancel_batch, cancel_one, cancel_waiting, record_step
from .pausing import PausedQueue, apause, apaused, aresume, pause, paused, resume

__all__ = [
    "CancelAnswer",
    "CancelledMany",
    "PausedQueue",
    "RetryAnswer",
    "acancel",
    "acancel_many",
    "apause",
    "apaused",
    "aresume",
    "aretry",
    "cancel",
    "cancel_many",
    "cancel_waiting",
    "pause",
    "paused",
    "resume",
    "retry",
]

RetryAnswer = Literal["retried", "unfinished", "completed", "duplicate"]
REASON_MAX = 65_536
"""Bytes of a reason in JSON."""
MANY = 500
"""Jobs of one batch of `cancel_many`."""


def cancel(job_id: str | JobId, reason: str | None = None, kind: str = "user") -> CancelAnswer:
    """Cancel a job, in the caller's transaction if there is one; say what happened.

    - `cancelled`: it waited, and will not run.
    - `requested`: it runs, and its handler has been asked (the first reason stays). Or
      somebody holds its row right now: it won't start again.
    - `finished`: it was over already, nothing has changed.

    `kind` says who asks (`user`, `admin`, …; up to 40 characters). Raises `WrongBrand`,
    `UnknownJob`, `InvalidPayload` for a reason or kind that can't be stored, and
    `InvalidArgument` for a kind of another length.
    """
    id = JobId.parse(job_id)
    text = _checked(reason, kind)
    using = router.db_for_write(Job)
    with transaction.atomic(using=using, savepoint=False):
        answer = cancel_one(using, id, text, kind)
    if answer is None:  # raised out here: inside, it would spoil the caller's transaction
        raise UnknownJob(f"There is no job {id}.")
    return answer


async def acancel(
    job_id: str | JobId, reason: str | None = None, kind: str = "user"
) -> CancelAnswer:
    """See cancel()."""
    return await in_database_thread(cancel, job_id, reason, kind)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CancelledMany:
    """What became of how many jobs; the words are those of `cancel`."""

    cancelled: int = 0
    requested: int = 0
    finished: int = 0
    """Ended between the look for them and the cancel."""
    failed: int = 0
    """The database refused it, of each alone; the log says why. Nothing has changed."""


def cancel_many(where: Q, reason: str | None = None, kind: str = "user") -> CancelledMany:
    """Cancel all unfinished jobs that a filter on `Job` selects; say what happened to how many.

        control.cancel_many(Q(queue="mail", task_path="shop.tasks.send"), "wrong issue")

    In order of id, in batches of a few hundred, each in a transaction of its own (or all in the
    caller's). Never waits for a row that somebody holds: that job is asked, as one that runs is.
    Jobs that are enqueued meanwhile may be found or not. `Q()` is all of them. Raises as `cancel`,
    and what the database raises when it takes no more statements: a lost connection, or any error
    in the caller's transaction. A note of that error says what was done before it.
    """
    text = _checked(reason, kind)
    using = router.db_for_write(Job)
    counts: Counter[str] = Counter()
    unfinished = Job.objects.using(using).filter(where, state__in=ACTIVE).order_by("pk")

    def cancel_some(ids: Sequence[UUID]) -> None:
        with transaction.atomic(using=using, savepoint=False):
            answers = cancel_batch(using, ids, text, kind)
        counts.update(answers)

    try:
        page = list(unfinished.values_list("pk", flat=True)[:MANY])
        while page:
            failures = for_each(using, page, cancel_some, doing="cancel", together=MANY)
            counts["failed"] += len(failures)
            following = unfinished.filter(pk__gt=page[-1])
            page = list(following.values_list("pk", flat=True)[:MANY])
    except Exception as error:
        error.add_note(f"Done before that: {CancelledMany(**counts)}.")
        raise
    return CancelledMany(**counts)


async def acancel_many(where: Q, reason: str | None = None, kind: str = "user") -> CancelledMany:
    """See cancel_many()."""
    return await in_database_thread(cancel_many, where, reason, kind)


def retry(job_id: str | JobId) -> RetryAnswer:
    """Let a failed or cancelled job run again; say what happened.

    - `retried`: it is ready again, with at least one attempt left; its errors stay.
    - `unfinished`: it waits or runs already.
    - `completed`: it succeeded, and isn't run twice. Enqueue it anew if you mean it.
    - `duplicate`: it is unique, and another job of its key waits or runs.

    Raises `WrongBrand`, `UnknownJob`.
    """
    id = JobId.parse(job_id)
    using = router.db_for_write(Job)
    with transaction.atomic(using=using, savepoint=False):
        answer = _retry(using, id)
    if answer is None:
        raise UnknownJob(f"There is no job {id}.")
    return answer


async def aretry(job_id: str | JobId) -> RetryAnswer:
    """See retry()."""
    return await in_database_thread(retry, job_id)


def _retry(using: str, id: JobId) -> RetryAnswer | None:
    jobs = Job.objects.using(using)
    at = now_as_django()
    again = jobs.filter(pk=id, state__in=[JobState.FAILED, JobState.CANCELLED])
    try:
        with transaction.atomic(using=using):  # the index of unique jobs may refuse it
            changed = again.update(
                state=JobState.READY,
                parked=False,
                run_after=at,
                finished_at=None,
                cancel_reason="",
                cancel_kind="",
                max_attempts=Greatest("max_attempts", F("attempt") + 1),
                worker=None,
                progress=None,
                progress_note="",
            )
    except IntegrityError:
        return "duplicate"
    job = jobs.filter(pk=id).first()
    if job is None:
        return None
    if not changed:
        return "completed" if job.state == JobState.COMPLETED else "unfinished"
    CancelRequest.objects.using(using).filter(job=id).delete()
    more = {"reason": "retried by hand", "run_after": journal.timestamp(at)}
    record_step(using, job, journal.RETRYING, at, more)
    after_commit(using, partial(engine.notify, queue_wake_group(job.queue)))
    return "retried"


def _checked(reason: str | None, kind: str) -> str:
    text = reason or ""
    for given, what in ((text, "the reason"), (kind, "kind")):
        if not isinstance(given, str):
            raise InvalidPayload(f"{what} is a text, not {type(given).__name__}.")
        encode(given, limit=REASON_MAX, what=what)
    if not 1 <= len(kind) <= KIND_MAX:
        raise InvalidArgument(f"kind is a text of 1 to {KIND_MAX} characters, not {kind!r}.")
    return text
