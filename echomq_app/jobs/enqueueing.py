"""Enqueue: the job and its `enqueued` record, in the caller's transaction.

One statement on PostgreSQL. Nothing is told to anybody before the commit; then the feed
hears of it, and the workers of the queue are woken.

Whether a unique job is the first of its key is decided by an index: by that of the jobs
which wait or run, or by the key's row in the windows. Of two transactions that enqueue the
same key at once, the second waits for the first one's end.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from functools import partial
from typing import Any

import msgspec
from django.db import connections, transaction

from .. import engine
from ..core.ids import JobId, new_job_id
from ..core.names import queue_stream, queue_wake_group
from ..models.job import JobState
from ..models.times import now, stored
from ..models.transactions import after_commit
from . import journal, unique
from .journal import Entry

# Those of its own first, then those of `common_row`, then what every new job has.
COLUMNS = (
    "INSERT INTO echomq_job (id, arguments, unique_key,"
    " queue, task_path, priority, run_after, state, max_attempts, options, enqueued_at,"
    " group_key, group_limit, retention,"
    " attempt, fence, worker_name, progress_note, errors, cancel_reason, cancel_kind, parked)"
)
COMMON = "%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, 0, 0, '', '', '[]', '', '', false"
ROW = f"%s, %s, %s, {COMMON}"
INSERT = f"{COLUMNS} VALUES ({ROW})"
# The record is written after the job: a row of the outbox draws its id in a transaction that has
# a number, see outbox_v1.sql.
_POSTGRES = (
    f"WITH job AS ({INSERT} RETURNING id)"
    " INSERT INTO echomq_outbox (stream, record, xact) SELECT %s, %s::jsonb, NULL FROM job"
)
_POSTGRES_UNIQUE = _POSTGRES.replace(" RETURNING", " ON CONFLICT DO NOTHING RETURNING")
_POSTGRES_WINDOW = (
    f"WITH held AS ({unique.TAKE_POSTGRES}), job AS ({COLUMNS} SELECT {ROW} FROM held"
    " RETURNING id)"
    " INSERT INTO echomq_outbox (stream, record, xact) SELECT %s, %s::jsonb, NULL FROM job"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What is enqueued, but for its arguments: all calls of a task have it in common."""

    queue: str
    task_path: str
    priority: int
    run_after: dt.datetime | None
    max_attempts: int
    options: str
    """JSON text of the `options` column."""
    unique_key: str = ""
    unique_for: float | None = None
    """Seconds; None: while the job waits or runs."""
    group_key: str = ""
    group_limit: int | None = None
    retention: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """What came of it."""

    id: str
    state: JobState
    enqueued_at: dt.datetime
    duplicate: bool = False
    """There was a job of this key: it is that one, and nothing was written."""


def enqueue(using: str, new: NewJob, arguments: str) -> Enqueued:
    """Write a job, and its record; tell of both after the commit.

    `arguments`: JSON text of `{"args": [...], "kwargs": {...}}`.
    A unique job of whose key there is one gives that one, and writes nothing.
    """
    at = now()
    job_id = new_job_id()
    entry, run_after = first_entry(new, job_id, at)
    while not _insert(using, new, entry, arguments, at, run_after):
        # The holder may end between the two statements: then it is our turn.
        holder = unique.holder(using, new.unique_key, window=new.unique_for is not None)
        if holder is not None:
            return Enqueued(
                id=str(holder.id),
                state=holder.state,
                enqueued_at=holder.enqueued_at,
                duplicate=True,
            )
    after_commit(using, partial(_tell, entry))
    return Enqueued(id=entry.data["id"], state=JobState(entry.data["state"]), enqueued_at=at)


def first_entry(new: NewJob, job_id: JobId, at: dt.datetime) -> tuple[Entry, dt.datetime]:
    """Return the record of a job that is enqueued, with its state, and when it is due."""
    later = new.run_after is not None and new.run_after > at
    # A time in the past would overtake jobs that wait already.
    run_after = new.run_after if later and new.run_after is not None else at
    moment = journal.timestamp(at)
    data: dict[str, Any] = {
        "id": str(job_id),
        "task": new.task_path,
        "state": (JobState.SCHEDULED if later else JobState.READY).value,
        "attempt": 0,
        "at": moment,
        "priority": new.priority,
        "run_after": moment if run_after is at else journal.timestamp(run_after),
    }
    return Entry(new.queue, journal.ENQUEUED, job_id, data), run_after


def common_row(
    connection: Any, new: NewJob, state: str, at: dt.datetime, run_after: dt.datetime
) -> tuple[Any, ...]:
    """Return the parameters of `COMMON`, the same for all calls of `new`."""
    return (
        new.queue,
        new.task_path,
        new.priority,
        stored(run_after, connection),
        state,
        new.max_attempts,
        new.options,
        stored(at, connection),
        new.group_key,
        new.group_limit,
        new.retention,
    )


def record_of(entry: Entry) -> dict[str, Any]:
    """Return the record as it is stored in the outbox."""
    return {"type": entry.event, "key": entry.data["id"], "data": entry.data}


def _insert(
    using: str,
    new: NewJob,
    entry: Entry,
    arguments: str,
    at: dt.datetime,
    run_after: dt.datetime,
) -> bool:
    """Write the job and its record; False if its key is taken, and then nothing."""
    connection = connections[using]
    window = new.unique_for is not None and bool(new.unique_key)
    row = (
        f"{entry.job_id.int:032x}",
        arguments,
        "" if window else new.unique_key,
        *common_row(connection, new, entry.data["state"], at, run_after),
    )
    if connection.vendor == "postgresql":
        told = (queue_stream(new.queue), msgspec.json.encode(record_of(entry)).decode())
        with connection.cursor() as cursor:
            if window:
                taking = (new.unique_key, entry.job_id.hex, new.unique_for)
                cursor.execute(_POSTGRES_WINDOW, (*taking, *row, *told))
            else:
                statement = _POSTGRES_UNIQUE if new.unique_key else _POSTGRES
                cursor.execute(statement, (*row, *told))
            return bool(cursor.rowcount)
    with transaction.atomic(using=using, savepoint=False), connection.cursor() as cursor:
        # A write first: it takes the write lock.
        if window and not unique.take_sqlite(
            cursor, new.unique_key, entry.job_id.hex, at, new.unique_for or 0
        ):
            return False
        cursor.execute(f"{INSERT} ON CONFLICT DO NOTHING" if new.unique_key else INSERT, row)
        if not cursor.rowcount:
            return False
        journal.write(using, [entry])
    return True


def _tell(entry: Entry) -> None:
    journal.publish([entry])
    wake(entry.queue, entry.data["state"])


def wake(queue: str, state: str) -> None:
    """Wake the workers of a queue, if its new jobs are due."""
    if state == JobState.READY:
        engine.notify(queue_wake_group(queue))
