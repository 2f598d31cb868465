"""The begin of attempts: counted in the database first, then the handlers start.

A claimed job waits in its worker, and a worker that is killed has begun few of the hundreds
that it may have claimed. So an attempt counts when its handler begins, by a statement of its
own that is committed before that: a handler that kills its process in its first microsecond
has been counted, and a job that waited has not.

One statement per handler would cost short jobs most of their rate. The rules:

- A job is counted when it has a slot. Many that get theirs at the same moment share a statement.
- While handlers begin by the hundred, those of the next few milliseconds are counted ahead
  (`core/prefetch.py`). If the worker is killed then, they have lost an attempt.
- So only the first of several attempts is counted ahead: a job loses one at most, and never its
  last.
- After a last attempt, the slot goes on only when the outcome is written (`attempts.py`): what
  follows there may kill the process, and this job couldn't be run again.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Sequence
from functools import partial

from django.db import connections, transaction

from ..models.each import Failure, for_each
from ..models.job import JobState
from ..models.times import from_cursor, now, stored
from . import journal
from .buffer import Buffer
from .connections import TRANSIENT, Persistent, read_committed, service_connection
from .journal import Entry
from .running import Asked, RunningJob
from .wakeup import Wakeup

_POSTGRES = "SELECT id, fence, begun_at FROM echomq_begin_v1(%s::uuid[], %s::bigint[])"
_SQLITE = (
    "UPDATE echomq_job SET attempt = attempt + 1, begun_fence = fence, attempted_at = %s,"
    " started_at = coalesce(started_at, %s)"
    " WHERE id = %s AND fence = %s AND state = 'running' AND begun_fence <> fence"
)
_SQLITE_BEGUN = (
    "SELECT EXISTS"
    " (SELECT 1 FROM echomq_job"
    " WHERE id = %s AND fence = %s AND begun_fence = fence AND state = 'running')"
)
_REASON = 200
LOOK = 1.0
"""Seconds between two looks that nobody asked for."""


def begin(using: str, jobs: Sequence[RunningJob]) -> list[RunningJob]:
    """Count the attempts of claimed jobs, and record their start; return those to start.

    Committed when it returns. The others aren't ours any more, or another transaction holds
    the row. Raises what the database raises; then it may be called again.
    """
    if connections[using].vendor == "sqlite":
        return _begin_sqlite(using, jobs)
    ids = ",".join([f"{job.claimed.id.int:032x}" for job in jobs])
    fences = ",".join([str(job.claimed.fence) for job in jobs])
    connection = connections[using]
    with read_committed(using), connection.cursor() as cursor:
        cursor.execute(_POSTGRES, (f"{{{ids}}}", f"{{{fences}}}"))
        rows = cursor.fetchall()
    if not rows:
        return []
    # By fence too: a job may come back while an earlier claim of it waits here.
    begun = {(id.int, fence) for id, fence, _ in rows}
    at = from_cursor(rows[0][2], connection.timezone)
    ours = [job for job in jobs if (job.claimed.id.int, job.claimed.fence) in begun]
    return _begun(ours, at)


def _begin_sqlite(using: str, jobs: Sequence[RunningJob]) -> list[RunningJob]:
    at = now()
    new, before = [], []
    with transaction.atomic(using=using), connections[using].cursor() as cursor:
        time = stored(at, connections[using])
        for job in jobs:
            claim = (job.claimed.id.hex, job.claimed.fence)
            cursor.execute(_SQLITE, (time, time, *claim))
            if cursor.rowcount:
                new.append(job)
                continue
            cursor.execute(_SQLITE_BEGUN, claim)  # by a call whose answer was lost
            if cursor.fetchone()[0]:
                before.append(job)
        journal.write(using, [_started(job, at) for job in new])
    return _begun([job for job in jobs if job in new or job in before], at)


def _begun(jobs: list[RunningJob], at: dt.datetime) -> list[RunningJob]:
    for job in jobs:
        job.begin(at)
    return jobs


def publish(jobs: Sequence[RunningJob]) -> None:
    """Send the starts of jobs that `begin` returned to the feed."""
    journal.publish([_started(job, job.claimed.attempted_at) for job in jobs])


def _started(job: RunningJob, at: dt.datetime | None) -> Entry:
    """Say that an attempt begins. On PostgreSQL the database records the same itself."""
    claimed = job.claimed
    data = {
        "id": str(claimed.id),
        "task": claimed.task_path,
        "state": JobState.RUNNING.value,
        "attempt": claimed.attempt,
        "at": journal.timestamp(at),
        "worker": claimed.worker_name,
    }
    return Entry(claimed.queue, journal.STARTED, claimed.id, data)


class Starter:
    """One thread with one connection, which begins what the buffer has slots for."""

    def __init__(
        self,
        using: str,
        buffer: Buffer,
        *,
        patience: float,
        start: Callable[[RunningJob], object],
        release: Callable[[list[RunningJob], str], object],
        fail: Callable[[RunningJob, Exception], object],
        on_begun: Callable[[], object],
    ) -> None:
        """`start(job)` runs a handler in a slot, `release` gives jobs up, `fail` ends an attempt
        that the database refuses to count; `on_begun()`: there are records.
        """
        self._using = using
        self._buffer = buffer
        self._patience = patience
        self._start = start
        self._release = release
        self._fail = fail
        self._on_begun = on_begun
        self._wakeup = Wakeup()
        self._thread = threading.Thread(target=self._run, name="echomq-starter", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Look now: a job waits, or a slot is free. Returns at once."""
        self._wakeup.call()

    def close(self, timeout: float) -> None:
        """Begin nothing more."""
        self._buffer.close()
        self._wakeup.close()
        self._thread.join(timeout)

    def _run(self) -> None:
        service = service_connection(self._using, "starter", self._wakeup, patience=self._patience)
        with service as persistent:
            connect = connections[self._using].ensure_connection
            persistent.attempt("connect", connect, default=None)
            while not self._wakeup.closed:
                self._turn(persistent)
                self._wakeup.wait(LOOK)

    def _turn(self, persistent: Persistent) -> None:
        self._go([])  # what was counted by its claim
        while jobs := self._buffer.to_begin():
            # Cancelled while they waited: they take a slot, and their handlers don't begin.
            waiting = [job for job in jobs if not job.token.cancelled]
            done = persistent.attempt("begin", partial(self._begin, waiting), None)
            if done is None:
                self._buffer.put_back(jobs)
                return
            begun, failures = done
            if begun:
                publish(begun)
                self._on_begun()
            for job, error in failures:
                if isinstance(error, TRANSIENT):
                    self._release([job], f"its attempt couldn't be counted: {error}"[:_REASON])
                else:
                    self._fail(job, error)
            failed = [failure.item for failure in failures]
            refused = [job for job in waiting if not job.begun and job not in failed]
            if refused:
                self._release(refused, "its row was locked or claimed by another worker")
            self._go([job for job in jobs if job not in refused and job not in failed])

    def _begin(self, jobs: list[RunningJob]) -> tuple[list[RunningJob], list[Failure[RunningJob]]]:
        """Count attempts, together or, where one of them fails, each alone."""
        begun: list[RunningJob] = []

        def count(some: Sequence[RunningJob]) -> None:
            begun.extend(begin(self._using, some))

        failures = for_each(self._using, jobs, count, doing="begin", together=max(1, len(jobs)))
        return begun, failures

    def _go(self, jobs: list[RunningJob]) -> None:
        for job in self._buffer.counted(jobs):
            self._start(job)
        if self._buffer.closed:  # meanwhile, and whoever closed it has taken the others
            self._release(self._buffer.take_all(), Asked.SHUTDOWN.value)
