"""What some worker has to do now and then, for everybody: every worker does it.

Promote scheduled jobs that are due, enqueue recurring ones, take jobs away from workers
whose lease has run out, cancel jobs that went back to the queue after somebody had asked,
delete jobs whose retention is over, trim streams, forget old workers. All of it may run in
any number of workers at once.
"""

from __future__ import annotations

import datetime as dt
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection

from django.db import connections, transaction
from django.db.models import Exists, OuterRef

from .. import engine
from ..core.ids import JobId
from ..core.names import queue_wake_group
from ..exceptions import WorkerLost
from ..models import trimming
from ..models.job import FINISHED, CancelRequest, Job, JobQuerySet, JobState
from ..models.queue import Queue
from ..models.times import as_django, database_now, now
from ..models.worker import Worker
from . import journal, retention, schedule
from .connections import service_connection
from .control import cancel_waiting
from .outcomes import Ending, Outcome, error_record
from .transitions import settle
from .wakeup import Wakeup

logger = logging.getLogger("echomq.jobs")

PAGE = 100
PROMOTE_BATCH = 1000
SHORTEST = 0.01
"""Seconds between two looks at least."""
RETENTION_INTERVAL = 60.0


class Housekeeper:
    """One thread with one connection; see the module."""

    def __init__(
        self,
        using: str,
        queues: Collection[str],
        *,
        interval: float,
        patience: float,
        on_ready: Callable[[], object],
    ) -> None:
        self._using = using
        self._queues = sorted(queues)
        self._interval = interval
        self._patience = patience
        self._on_ready = on_ready
        self._wakeup = Wakeup()
        self._next_retention = time.monotonic() + RETENTION_INTERVAL
        self._schedules: list[schedule.Entry] | None = None
        self._thread = threading.Thread(target=self._run, name="echomq-housekeeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Stop, after what it is at."""
        self._wakeup.close()
        self._thread.join(timeout)

    def _run(self) -> None:
        service = service_connection(
            self._using, "housekeeper", self._wakeup, patience=self._patience
        )
        with service as persistent:
            while not self._wakeup.closed:
                pause = persistent.attempt("promote", self._promote, default=self._interval)
                tick = persistent.attempt("schedule", self._tick, default=self._interval)
                pause = min(pause, tick)
                persistent.attempt("rescue", self._rescue, default=None)
                persistent.attempt("sweep", self._sweep, default=None)
                if time.monotonic() >= self._next_retention:
                    self._next_retention = time.monotonic() + RETENTION_INTERVAL
                    persistent.attempt("retention", self._retain, default=None, may_take_long=True)
                self._wakeup.wait(pause)

    def _promote(self) -> float:
        """Make due jobs ready; return the seconds until there is something to do again."""
        at = as_django(database_now(self._using))
        promoted = promote(self._using, self._queues, at)
        for queue in promoted:
            self._on_ready()
            engine.notify(queue_wake_group(queue))
        if promoted:
            return SHORTEST  # there may be more
        # Not what is due already: somebody holds it, and may do so for hours.
        waiting = Job.objects.using(self._using).filter(state=JobState.SCHEDULED, run_after__gt=at)
        soonest = self._interval
        for queue in self._queues:
            times = waiting.filter(queue=queue).order_by("run_after")
            next_due = times.values_list("run_after", flat=True).first()
            if next_due is not None:
                soonest = min(soonest, (next_due - at).total_seconds())
        return max(SHORTEST, soonest)

    def _tick(self) -> float:
        """Enqueue recurring jobs that are due; return the seconds to the next one."""
        if self._schedules is None:
            found = schedule.configured()
            schedule.sync(self._using, found, database_now(self._using))
            Queue.objects.using(self._using).ensure(self._queues)
            self._schedules = found
        if not self._schedules:
            return self._interval
        next_in = schedule.run_due(self._using, self._schedules, database_now(self._using))
        return self._interval if next_in is None else max(SHORTEST, min(next_in, self._interval))

    def _rescue(self) -> None:
        if rescue(self._using):
            self._on_ready()

    def _sweep(self) -> None:
        sweep(self._using)

    def _retain(self) -> None:
        _, more = retention.prune_expired(self._using)
        if more:
            self._next_retention = time.monotonic()
        Worker.objects.using(self._using).prune()
        trimming.apply_retention(self._using)


def promote(using: str, queues: Collection[str], at: dt.datetime | None = None) -> set[str]:
    """Make scheduled jobs ready whose time has come at `at`, or now; return their queues."""
    at = at or as_django(database_now(using))
    due = Job.objects.using(using).in_queues(queues).due(at)
    # Without the write lock: most of the time there is nothing to do.
    if not due.exists():
        return set()
    with transaction.atomic(using=using):
        some = due.order_by("queue", "run_after")
        if connections[using].features.has_select_for_update_skip_locked:
            some = some.skip_locked()
        found = dict(some.values_list("pk", "queue")[:PROMOTE_BATCH])
        Job.objects.using(using).filter(pk__in=found, state=JobState.SCHEDULED).update(
            state=JobState.READY
        )
    return set(found.values())


def rescue(using: str) -> int:
    """Take jobs away from workers whose lease has run out; return how many."""
    with transaction.atomic(using=using):
        lost = Worker.objects.using(using).lose_expired()
    if lost:
        logger.error("event=leases_expired count=%d noticed_by=%s", lost, socket.gethostname())
    abandoned = Job.objects.using(using).abandoned().order_by("pk")
    rescued = 0
    page = list(abandoned[:PAGE])
    while page:
        settlement = settle(using, [_abandoned(job) for job in page])
        journal.publish(settlement.entries)
        rescued += len(page) - len(settlement.later) - len(settlement.lost)
        page = _next_page(abandoned, page)
    return rescued


def _next_page(jobs: JobQuerySet, page: list[Job]) -> list[Job]:
    """Go on by key, not from the front: rows that somebody holds stay, and must not hide others."""
    return list(jobs.filter(pk__gt=page[-1].pk)[:PAGE])


def sweep(using: str) -> None:
    """Cancel waiting jobs that somebody asked to cancel, and forget answered requests.

    A request may be written in the very moment in which the job goes back to the queue;
    no claim takes such a job, and here it ends.
    """
    requests = CancelRequest.objects.using(using)
    waiting = Job.objects.using(using).waiting().cancel_requested().order_by("pk")
    page = list(waiting[:PAGE])
    while page:
        for job in page:
            request = requests.filter(job=job).first()
            if request is not None:
                with transaction.atomic(using=using):
                    cancel_waiting(using, JobId.parse(job.pk), request.reason, request.kind)
        page = _next_page(waiting, page)
    unfinished = Job.objects.filter(pk=OuterRef("job")).exclude(state__in=FINISHED)
    answered = requests.filter(~Exists(unfinished))
    if answered.exists():
        answered.delete()


def _abandoned(job: Job) -> Outcome:
    at = now()
    error = None
    if job.has_begun:
        lost = WorkerLost(
            f"Worker {job.worker_name} stopped renewing its lease during attempt {job.attempt}: "
            "it was killed, or cut off from the database."
        )
        error = error_record(lost, attempt=job.attempt, worker=job.worker_name, at=at)
    return Outcome(
        id=job.pk,
        queue=job.queue,
        task_path=job.task_path,
        fence=job.fence,
        attempt=job.attempt if job.has_begun else job.attempt + 1,
        max_attempts=job.max_attempts,
        ending=Ending.ABANDONED,
        begun=job.has_begun,
        at=at,
        options=job.options,
        errors=job.errors,
        error=error,
    )
