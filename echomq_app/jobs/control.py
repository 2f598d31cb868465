"""Cancel and retry jobs, pause queues, from anywhere that reaches the database.

    from echomq_app.jobs import control

    control.cancel(result.id, "the user closed the page")    # "requested"

A job that waits is cancelled on the spot. A job that runs is asked: the request is a row
(the memory), the wake-up over the channel layer is only the reflex, and the handler
decides when to stop. Neither waits for the job's row, whoever holds it.
"""

from __future__ import annotations

import datetime as dt
from functools import partial
from typing import Any, Literal

from django.db import IntegrityError, connections, router, transaction
from django.db.models import F
from django.db.models.functions import Greatest
from django.utils import timezone

from .. import engine
from ..core.ids import JobId
from ..core.names import queue_wake_group
from ..core.payload import encode
from ..exceptions import InvalidArgument, InvalidPayload, UnknownJob
from ..models.job import CancelRequest, Job, JobState
from ..models.threads import in_database_thread
from ..models.times import now, stored
from ..models.transactions import after_commit
from . import journal
from .journal import Entry
from .pausing import PausedQueue, apause, apaused, aresume, pause, paused, resume

__all__ = [
    "CancelAnswer",
    "PausedQueue",
    "RetryAnswer",
    "acancel",
    "apause",
    "apaused",
    "aresume",
    "aretry",
    "cancel",
    "cancel_waiting",
    "pause",
    "paused",
    "resume",
    "retry",
]

CancelAnswer = Literal["cancelled", "requested", "finished"]
RetryAnswer = Literal["retried", "unfinished", "completed", "duplicate"]
REASON_MAX = 65_536
"""Bytes of a reason in JSON."""
KIND_MAX = 40


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
    text = reason or ""
    for given, what in ((text, "the reason"), (kind, "kind")):
        if not isinstance(given, str):
            raise InvalidPayload(f"{what} is a text, not {type(given).__name__}.")
        encode(given, limit=REASON_MAX, what=what)
    if not 1 <= len(kind) <= KIND_MAX:
        raise InvalidArgument(f"kind is a text of 1 to {KIND_MAX} characters, not {kind!r}.")
    using = router.db_for_write(Job)
    with transaction.atomic(using=using, savepoint=False):
        answer = _cancel(using, id, text, kind)
    if answer is None:  # raised out here: inside, it would spoil the caller's transaction
        raise UnknownJob(f"There is no job {id}.")
    return answer


async def acancel(
    job_id: str | JobId, reason: str | None = None, kind: str = "user"
) -> CancelAnswer:
    """See cancel()."""
    return await in_database_thread(cancel, job_id, reason, kind)


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


def cancel_waiting(using: str, id: JobId, reason: str) -> bool:
    """Cancel a job that is ready or scheduled and that nobody holds; tell whether it was.

    In the caller's transaction. The one way in which a job is cancelled that didn't run.
    """
    jobs = Job.objects.using(using)
    free = jobs.waiting().filter(pk=id)
    if connections[using].features.has_select_for_update_skip_locked:
        free = free.skip_locked()
    at = timezone.now()
    # A write first, for SQLite; and the state is looked at again in the UPDATE itself.
    changed = (
        jobs.waiting()
        .filter(pk__in=free.values("pk"))
        .update(state=JobState.CANCELLED, cancel_reason=reason, finished_at=at, worker=None)
    )
    if not changed:
        return False
    earlier = CancelRequest.objects.using(using).filter(job=id).first()
    if earlier is not None:  # it ran when somebody asked first, and was handed back
        reason = earlier.reason
        jobs.filter(pk=id).update(cancel_reason=reason)
        earlier.delete()
    more = {"reason": reason or None, "finished_at": journal.timestamp(at)}
    _record(using, jobs.get(pk=id), journal.CANCELLED, at, more)
    return True


def _cancel(using: str, id: JobId, reason: str, kind: str) -> CancelAnswer | None:
    if cancel_waiting(using, id, reason):
        return "cancelled"
    job = Job.objects.using(using).filter(pk=id).first()
    if job is None:
        return None
    if job.is_finished:
        return "finished"
    at = timezone.now()
    asked = _insert_request(using, id, reason, kind)
    # It may have gone back to the queue, or ended, between the two looks.
    if cancel_waiting(using, id, reason):
        return "cancelled"
    job = Job.objects.using(using).get(pk=id)
    if job.is_finished:
        CancelRequest.objects.using(using).filter(job=id).delete()
        return "finished"
    if asked:
        more = {"reason": reason or None, "kind": kind}
        _record(using, job, journal.CANCEL_REQUESTED, at, more)
        after_commit(using, partial(engine.notify, queue_wake_group(job.queue)))
    return "requested"


def _retry(using: str, id: JobId) -> RetryAnswer | None:
    jobs = Job.objects.using(using)
    at = timezone.now()
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
    _record(using, job, journal.RETRYING, at, more)
    after_commit(using, partial(engine.notify, queue_wake_group(job.queue)))
    return "retried"


def _insert_request(using: str, id: JobId, reason: str, kind: str) -> bool:
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO echomq_cancelrequest (job_id, reason, kind, requested_at)"
            " VALUES (%s, %s, %s, %s) ON CONFLICT (job_id) DO NOTHING",
            (id.hex, reason, kind, stored(now(), connection)),
        )
        return bool(cursor.rowcount)


def _record(using: str, job: Job, event: str, at: dt.datetime, more: dict[str, Any]) -> None:
    """Write what happened to the job, as it is now, and publish it after the commit."""
    data = {
        "id": str(job.pk),
        "task": job.task_path,
        "state": job.state,
        "attempt": job.attempt,
        "at": journal.timestamp(at),
        **more,
    }
    entry = Entry(job.queue, event, job.pk, data)
    journal.write(using, [entry])
    after_commit(using, partial(journal.publish, [entry]))
