"""Run jobs here and now, one after the other, in the caller's thread and transaction.

What a worker does, by the same functions and in the same order, without its threads and
its lease: for tests (`echomq_app.testing.run_jobs`).
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import os
import socket
from collections.abc import Collection
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync

from ..models.job import Job, JobState
from ..models.worker import Worker
from . import begins, handlers, journal, retention
from .claims import ClaimedJob, Claims
from .completer import progress_entry
from .housekeeping import promote, sweep
from .outcomes import Outcome
from .results import JobResult, result_of
from .running import RunningJob
from .tasks_api import DEFAULT_TASK_BACKEND_ALIAS
from .transitions import settle, write_progress

NAME = "run_jobs"
_LEASE = 86_400.0


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Inline:
    """A worker that does one thing at a time."""

    def __init__(self, using: str) -> None:
        self._using = using
        # Each look at it is a second later: every claim is one from the front.
        self._claims = Claims(using, clock=itertools.count(0.0, 2.0).__next__)

    def run(self, queues: Collection[str], limit: int) -> list[JobResult]:
        """Run what is due in these queues (none: in all), also what that enqueues.

        Returns the result of each attempt, as it was when the attempt had ended. Raises
        `RuntimeError` after `limit` attempts.
        """
        workers = Worker.objects.using(self._using)
        row = workers.register(
            name=NAME,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=sorted(queues),
            concurrency=1,
            lease=_LEASE,
        )
        ran: list[JobResult] = []
        try:
            retention.prune_windows(self._using)
            retention.prune_expired(self._using)
            while (claimed := self._next(queues, row.pk)) is not None:
                if len(ran) == limit:
                    raise RuntimeError(
                        f"There is still something to do after {limit} attempts: does a job "
                        "enqueue itself? If that is meant, give a higher limit."
                    )
                ran.append(self._attempt(claimed))
        finally:
            workers.filter(pk=row.pk).delete()
        return ran

    def _next(self, queues: Collection[str], worker: int) -> ClaimedJob | None:
        jobs = Job.objects.using(self._using)
        waiting = jobs.filter(state__in=(JobState.READY, JobState.SCHEDULED))
        names = queues or waiting.order_by().values_list("queue", flat=True).distinct()
        promote(self._using, list(names))
        sweep(self._using)
        for queue in sorted(names):
            claimed = self._claims.take(queue, worker_id=worker, worker_name=NAME, limit=1)
            if claimed:
                return claimed[0]
        return None

    def _attempt(self, claimed: ClaimedJob) -> JobResult:
        job = RunningJob(claimed)
        begins.publish(begins.begin(self._using, [job]))
        # As in a worker's thread: nothing that the job activates is left behind.
        outcome = contextvars.Context().run(self._call, job)
        if outcome is not None:
            journal.publish(settle(self._using, [outcome]).entries)
        row = Job.objects.using(self._using).get(pk=claimed.id)
        return result_of(row, DEFAULT_TASK_BACKEND_ALIAS)

    def _call(self, job: RunningJob) -> Outcome | None:
        call = handlers.prepare(job, partial(self._report, job))
        if not isinstance(call, handlers.Call):
            return call
        function: Any = call.task.func
        # In this thread, and so is what it does by `sync_to_async`: the transaction is here.
        if handlers.is_async(call):
            function = async_to_sync(function)
        return handlers.run_here(call, function)

    def _report(self, job: RunningJob, fraction: float, note: str) -> None:
        job.progress = (fraction, note)
        # On a loop nothing can be written here; the end of the attempt writes it anyway.
        if not _is_on_a_loop():
            write_progress(self._using, [(job.claimed.id, job.claimed.fence, fraction, note)])
        journal.publish([progress_entry(job, fraction, note)])
