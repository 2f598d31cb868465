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
from collections.abc import Callable, Collection, Sequence

from django.db import transaction
from django.db.models import Exists, OuterRef

from .. import engine
from ..core.ids import JobId
from ..core.names import queue_wake_group
from ..exceptions import WorkerLost
from ..models import retention as stream_retention
from ..models.each import Rests, for_each
from ..models.job import (
    ACTIVE,
    FINISHED,
    WAITING,
    CancelRequest,
    Job,
    JobState,
)
from ..models.queue import Queue
from ..models.schedule import Schedule
from ..models.times import database_now, now
from ..models.worker import Worker
from . import journal, looks, retention, schedule
from .claims import ClaimedJob
from .connections import service_connection
from .control import cancel_waiting
from .outcomes import Ending, Outcome, error_record
from .schedule_claims import HOLD
from .transitions import settle
from .wakeup import Wakeup

logger = logging.getLogger("echomq.jobs")

PAGE = 100
PROMOTE_BATCH = 1000
MOST_RESCUED = 10_000
"""Jobs of one look for those without a worker."""
SHORTEST = 0.01
"""Seconds between two looks at least."""
RETENTION_INTERVAL = 60.0
RESCUE_INTERVAL = 5.0
"""Seconds between two looks for jobs without a worker when no lease was seen to run out: another
worker may have declared it lost and ended, or the row of a worker was deleted."""


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
        self._retention = (
            *(self._prune_windows, self._prune_jobs, self._prune_workers),
            *(self._prune_schedules, self._trim_streams),
        )
        self._next_rescue = 0.0
        self._promotions: Rests[str] = Rests()
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
                    for what in self._retention:
                        persistent.attempt("retention", what, default=None, may_take_long=True)
                self._wakeup.wait(pause)

    def _promote(self) -> float:
        """Make due jobs ready; return the seconds until there is something to do again."""
        at = database_now(self._using)
        found = looks.due(self._using, self._queues, at)
        promoted = _promote(self._using, found.queues, at, self._promotions)
        for queue in promoted:
            self._on_ready()
            engine.notify(queue_wake_group(queue))
        if promoted:
            return SHORTEST  # there may be more
        # Not what is due already: another transaction holds it, and may do so for hours.
        soonest = self._promotions.pause(self._interval)
        if found.next_at is not None:
            soonest = min(soonest, (found.next_at - at).total_seconds())
        return max(SHORTEST, soonest)

    def _tick(self) -> float:
        """Enqueue recurring jobs that are due; return the seconds to the next one."""
        hold = max(HOLD, 4 * self._interval)
        if self._schedules is None:
            found = schedule.configured()
            schedule.sync(self._using, found, database_now(self._using), hold)
            Queue.objects.using(self._using).ensure(self._queues)
            self._schedules = found
        if not self._schedules:
            return self._interval
        next_in = schedule.run_due(self._using, self._schedules, database_now(self._using), hold)
        return self._interval if next_in is None else max(SHORTEST, min(next_in, self._interval))

    def _rescue(self) -> None:
        lost = declare_lost(self._using)
        # A look is dear in a busy database: the index still has what ran and has ended.
        if lost or time.monotonic() >= self._next_rescue:
            self._next_rescue = time.monotonic() + RESCUE_INTERVAL
            rescued, left = rescue_abandoned(self._using)
            if left:
                self._next_rescue = 0.0
            if rescued:
                self._on_ready()

    def _sweep(self) -> None:
        sweep(self._using)

    def _prune_jobs(self) -> None:
        _, more = retention.prune_expired(self._using)
        if more:
            self._next_retention = time.monotonic()

    def _prune_windows(self) -> None:
        retention.prune_windows(self._using)

    def _prune_workers(self) -> None:
        Worker.objects.using(self._using).prune()

    def _prune_schedules(self) -> None:
        Schedule.objects.using(self._using).prune(database_now(self._using))

    def _trim_streams(self) -> None:
        if stream_retention.take_turn(self._using):
            self._next_retention = time.monotonic()


def promote(using: str, queues: Collection[str], at: dt.datetime | None = None) -> set[str]:
    """Make scheduled jobs ready whose time has come at `at`, or now; return their queues."""
    at = at or database_now(using)
    return _promote(using, looks.due(using, queues, at).queues, at, Rests())


def _promote(using: str, queues: Collection[str], at: dt.datetime, rests: Rests[str]) -> set[str]:
    promoted: set[str] = set()

    def make_ready(some: Sequence[str]) -> None:
        ready: set[str] = set()
        left, waiting = PROMOTE_BATCH, len(some)
        with transaction.atomic(using=using):
            for queue in some:
                share = max(1, left // waiting)  # one with many doesn't keep the others waiting
                ids = looks.due_page(using, queue, at, share)
                left, waiting = left - len(ids), waiting - 1
                jobs = Job.objects.using(using).filter(pk__in=ids, state=JobState.SCHEDULED)
                if ids and jobs.update(state=JobState.READY):
                    ready.add(queue)
        promoted.update(ready)

    rests.for_each(using, sorted(queues), make_ready, doing="promote", together=PAGE)
    return promoted


def rescue(using: str) -> int:
    """Take jobs away from workers whose lease has run out; return how many."""
    declare_lost(using)
    return rescue_abandoned(using)[0]


def declare_lost(using: str) -> int:
    """Declare the leases lost that have run out; return how many."""
    with transaction.atomic(using=using):
        lost = Worker.objects.using(using).lose_expired()
    if lost:
        logger.error("event=leases_expired count=%d noticed_by=%s", lost, socket.gethostname())
    return lost


def rescue_abandoned(using: str) -> tuple[int, int]:
    """Take jobs away from workers that are gone; return how many, and how many are left.

    Left are those whose rows another transaction holds, those for which it failed, and more than
    `MOST_RESCUED`.
    """
    ids = looks.abandoned(using, MOST_RESCUED)
    rescued, left = 0, len(ids) // MOST_RESCUED

    def take(some: Sequence[JobId]) -> None:
        nonlocal rescued, left
        # Looked at again: a job may have ended, and begun in a living worker since.
        jobs = Job.objects.using(using).abandoned().filter(pk__in=some)
        outcomes = [_abandoned(job) for job in jobs]
        settlement = settle(using, outcomes)
        journal.publish(settlement.entries)
        rescued += len(outcomes) - len(settlement.later) - len(settlement.lost)
        left += len(settlement.later)

    failed = for_each(using, ids, take, doing="rescue", together=PAGE)
    return rescued, left + len(failed)


def sweep(using: str) -> None:
    """Cancel waiting jobs that somebody asked to cancel, and forget answered requests.

    A request may be written in the very moment in which the job goes back to the queue;
    no claim takes such a job, and here it ends. By the requests, which are few: jobs may be
    millions.
    """
    requests = CancelRequest.objects.using(using).order_by("pk")
    page = list(requests[:PAGE])
    while page:
        jobs = Job.objects.using(using).filter(pk__in=[request.pk for request in page])
        states = dict(jobs.values_list("pk", "state"))

        def cancel(some: Sequence[CancelRequest]) -> None:
            (request,) = some
            with transaction.atomic(using=using):
                cancel_waiting(using, JobId.parse(request.pk), request.reason, request.kind)

        waiting = [request for request in page if states.get(request.pk) in WAITING]
        for_each(using, waiting, cancel, doing="sweep")
        answered = [request.pk for request in page if states.get(request.pk) not in ACTIVE]
        if answered:
            unfinished = Job.objects.filter(pk=OuterRef("job")).exclude(state__in=FINISHED)
            requests.filter(~Exists(unfinished), pk__in=answered).delete()
        page = list(requests.filter(pk__gt=page[-1].pk)[:PAGE])


def _abandoned(job: Job) -> Outcome:
    at = now()
    lost = error = None
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
        claimed=ClaimedJob.of(job),
        exception=lost,
    )
