"""What a project needs in its own tests of code that uses this app. See docs/testing.md."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from django.db import connections, router

from . import events
from .core.event import Event
from .core.hint import Hint
from .models import Job, Outbox, Record, times
from .models.relaying import Relay
from .models.threads import in_database_thread
from .models.transactions import in_transaction, refuse_old_snapshot

if TYPE_CHECKING:
    from .jobs.results import JobResult

__all__ = ["FakeClock", "arun_jobs", "capture_events", "fake_clock", "flush_outbox", "run_jobs"]


def flush_outbox(using: str | None = None) -> None:
    """Append now what the open transaction would append when it commits.

    A `TestCase` never commits, so what `append_on_commit` wrote would not be seen in it.
    Records of jobs (`emq.<queue>`) are appended too. The streams' locks are held from here to
    the end of the test. May be called any number of times. Does nothing on SQLite, where
    `append_on_commit` is `append`. Raises `IsolationError` under REPEATABLE READ and
    SERIALIZABLE: use a `TransactionTestCase` there.
    """
    alias = using or router.db_for_write(Record)
    connection = connections[alias]
    if connection.vendor != "postgresql":
        return
    refuse_old_snapshot(alias, "flush_outbox()")
    if in_transaction(connection):
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS echomq_outbox_commit_v1 IMMEDIATE")
            cursor.execute("SET CONSTRAINTS echomq_outbox_commit_v1 DEFERRED")
    left = Outbox.objects.using(alias).order_by("stream")
    for name in left.values_list("stream", flat=True).distinct():
        while Relay(alias, name).move(1_000):
            pass


def run_jobs(*queues: str, limit: int = 1_000) -> list[JobResult]:
    """Run the jobs that are due, in this thread and transaction; return what ran.

    Of these queues, or of all. One after the other: queue by queue in the order of their
    names, in each the highest priority and the longest due first; jobs that these jobs
    enqueue too, until nothing is due. Before that, jobs are deleted whose `retention` is over.
    One result per attempt, as it was at the attempt's end: `[(r.task.name, r.state) for r in
    run_jobs()]`. A failure doesn't raise, it is in `result.errors`. A retry whose backoff isn't
    over waits: `fake_clock` passes the time.

    Handlers, signals, states, records and events are those of a real worker. Async handlers
    run too, but call this from sync code; `arun_jobs` is for async tests. Raises `RuntimeError`
    after `limit` attempts.
    """
    from .jobs.inline import Inline  # needs Django's tasks, which the log alone doesn't

    return Inline(router.db_for_write(Job)).run(queues, limit)


async def arun_jobs(*queues: str, limit: int = 1_000) -> list[JobResult]:
    """See run_jobs()."""
    return await in_database_thread(partial(run_jobs, *queues, limit=limit))


@contextmanager
def capture_events(*queues: str, using: str | None = None) -> Iterator[list[Event]]:
    """Collect what this process publishes on the feeds of these queues, or of all.

    The list grows as events are published. What waits for the commit of a transaction that
    is open at the block's end, as a `TestCase`'s always is, comes then; what was rolled back
    never does. Events still go where they would go.
    """
    captured: list[Event] = []

    def tap(event: Event) -> None:
        if not queues or event.queue in queues:
            captured.append(event)

    connection = connections[using or router.db_for_write(Job)]
    before = list(connection.run_on_commit)
    events.taps.append(tap)
    try:
        yield captured
        if connection.in_atomic_block:
            for entry in list(connection.run_on_commit):
                if isinstance(entry[1], Hint) and not any(entry is other for other in before):
                    entry[1]()
    finally:
        events.taps.remove(tap)


class FakeClock:
    """The clock of jobs in this process; see `fake_clock`. It is never behind the real one."""

    @property
    def now(self) -> dt.datetime:
        """What time it is for jobs; aware."""
        return times.now()

    def advance(self, by: dt.timedelta | None = None, **parts: float) -> None:
        """Let time pass: a timedelta, or the arguments of one: `advance(hours=2)`."""
        ahead = dt.timedelta(**parts) if by is None else by
        if ahead < dt.timedelta():
            raise ValueError("Time passes forwards.")
        times.clock.ahead += ahead


@contextmanager
def fake_clock() -> Iterator[FakeClock]:
    """Let time pass for jobs without waiting, in this process, until the block ends.

    For `run_after`, the backoff of retries, and everything else that a job's time is written by
    or compared with; `retention` and `unique_for` that are over end with the next `run_jobs()`.
    Handlers' timeouts, the leases of workers, and `timezone.now()` in your own code follow the
    real clock.
    """
    before = times.clock.ahead
    try:
        yield FakeClock()
    finally:
        times.clock.ahead = before
