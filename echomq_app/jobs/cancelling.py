"""The writing of cancels: of one job, or of many.

A job that waits is cancelled on the spot, if nobody holds its row. Any other is asked, by a
row of its own, so that asking never waits for the job's row.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from .. import engine
from ..core.ids import JobId
from ..core.names import queue_wake_group
from ..models.job import CancelRequest, Job, JobState
from ..models.times import now, now_as_django, stored
from ..models.transactions import after_commit
from . import journal
from .journal import Entry

CancelAnswer = Literal["cancelled", "requested", "finished"]


def cancel_batch(using: str, ids: Sequence[Any], reason: str, kind: str) -> dict[CancelAnswer, int]:
    """Cancel jobs that were unfinished a moment ago, in the caller's transaction.

    Those that wait go in one statement. The others are as few as workers run at once.
    """
    jobs = Job.objects.using(using)
    # Who was asked before has a reason of its own, and is looked at one by one.
    free = jobs.waiting().filter(pk__in=ids, cancel_request=None)
    if connections[using].features.has_select_for_update_skip_locked:
        free = free.skip_locked()
    at = now_as_django()
    jobs.waiting().filter(pk__in=free.values("pk")).update(
        state=JobState.CANCELLED,
        cancel_reason=reason,
        cancel_kind=kind,
        finished_at=at,
        worker=None,
    )
    cancelled = list(
        jobs.filter(pk__in=ids, state=JobState.CANCELLED, finished_at=at).order_by("pk")
    )
    _record_ends(using, cancelled, reason, kind, at)
    counts: dict[CancelAnswer, int] = {"cancelled": len(cancelled), "requested": 0, "finished": 0}
    done = {job.pk for job in cancelled}
    for id in ids:
        if id not in done:
            answer = cancel_one(using, id, reason, kind)
            if answer is not None:
                counts[answer] += 1
    return counts


def cancel_waiting(using: str, id: JobId, reason: str, kind: str) -> bool:
    """Cancel a job that is ready or scheduled and that nobody holds; tell whether it was.

    In the caller's transaction. The one way in which a job is cancelled that didn't run.
    """
    jobs = Job.objects.using(using)
    free = jobs.waiting().filter(pk=id)
    if connections[using].features.has_select_for_update_skip_locked:
        free = free.skip_locked()
    at = now_as_django()
    # A write first, for SQLite; and the state is looked at again in the UPDATE itself.
    changed = (
        jobs.waiting()
        .filter(pk__in=free.values("pk"))
        .update(
            state=JobState.CANCELLED,
            cancel_reason=reason,
            cancel_kind=kind,
            finished_at=at,
            worker=None,
        )
    )
    if not changed:
        return False
    earlier = CancelRequest.objects.using(using).filter(job=id).first()
    if earlier is not None:  # it ran when somebody asked first, and was handed back
        reason, kind = earlier.reason, earlier.kind
        jobs.filter(pk=id).update(cancel_reason=reason, cancel_kind=kind)
        earlier.delete()
    _record_ends(using, [jobs.get(pk=id)], reason, kind, at)
    return True


def cancel_one(using: str, id: JobId, reason: str, kind: str) -> CancelAnswer | None:
    """Cancel a job, in the caller's transaction; None if there is none of that id."""
    if cancel_waiting(using, id, reason, kind):
        return "cancelled"
    job = Job.objects.using(using).filter(pk=id).first()
    if job is None:
        return None
    if job.is_finished:
        return "finished"
    at = now_as_django()
    asked = _insert_request(using, id, reason, kind)
    # It may have gone back to the queue, or ended, between the two looks.
    if cancel_waiting(using, id, reason, kind):
        return "cancelled"
    job = Job.objects.using(using).get(pk=id)
    if job.is_finished:
        CancelRequest.objects.using(using).filter(job=id).delete()
        return "finished"
    if asked:
        more = {"reason": reason or None, "kind": kind}
        record_step(using, job, journal.CANCEL_REQUESTED, at, more)
        after_commit(using, partial(engine.notify, queue_wake_group(job.queue)))
    return "requested"


def _insert_request(using: str, id: JobId, reason: str, kind: str) -> bool:
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO echomq_cancelrequest (job_id, reason, kind, requested_at)"
            " VALUES (%s, %s, %s, %s) ON CONFLICT (job_id) DO NOTHING",
            (id.hex, reason, kind, stored(now(), connection)),
        )
        return bool(cursor.rowcount)


def _record_ends(using: str, jobs: Sequence[Job], reason: str, kind: str, at: dt.datetime) -> None:
    """Write that these jobs are cancelled; publish and announce it after the commit."""
    more = {"reason": reason or None, "kind": kind, "finished_at": journal.timestamp(at)}
    record_steps(using, jobs, journal.CANCELLED, at, more)
    after_commit(using, partial(_announce, jobs))


def _announce(jobs: Sequence[Job]) -> None:
    try:
        from . import announcing  # needs Django's tasks, which a process that cancels may lack
    except ImproperlyConfigured:
        return
    announcing.cancelled(jobs)


def record_step(using: str, job: Job, event: str, at: dt.datetime, more: dict[str, Any]) -> None:
    """Write what happened to the job, as it is now, and publish it after the commit."""
    record_steps(using, [job], event, at, more)


def record_steps(
    using: str, jobs: Sequence[Job], event: str, at: dt.datetime, more: dict[str, Any]
) -> None:
    """Write that the same happened to all of these jobs, and publish it after the commit."""
    entries = [
        Entry(
            job.queue,
            event,
            job.pk,
            {
                "id": str(job.pk),
                "task": job.task_path,
                "state": job.state,
                "attempt": job.attempt,
                "at": journal.timestamp(at),
                **more,
            },
        )
        for job in jobs
    ]
    journal.write(using, entries)
    after_commit(using, partial(journal.publish, entries))
