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
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from django.db import connections, transaction
from msgspec.structs import astuple

from .. import engine
from ..core.ids import new_job_id
from ..core.names import queue_stream, queue_wake_group
from ..models.job import JobState
from ..models.times import now, stored
from ..models.transactions import after_commit
from . import journal, unique
from .journal import Entry

_COLUMNS = (
    "INSERT INTO echomq_job (id, queue, task_path, arguments, priority, run_after, state,"
    " attempt, max_attempts, options, fence, worker_name, enqueued_at, progress_note, errors,"
    " cancel_reason, cancel_kind, unique_key, group_key, group_limit, retention, parked)"
)
_ROW = "%s, %s, %s, %s, %s, %s, %s, 0, %s, %s, 0, '', %s, '', '[]', '', '', %s, %s, %s, %s, false"
_INSERT = f"{_COLUMNS} VALUES ({_ROW})"
_POSTGRES = (
    f"WITH job AS ({_INSERT}) INSERT INTO echomq_outbox (stream, record, xact)"
    " VALUES (%s, %s, NULL)"
)
_POSTGRES_UNIQUE = (
    f"WITH job AS ({_INSERT} ON CONFLICT DO NOTHING RETURNING id)"
    " INSERT INTO echomq_outbox (stream, record, xact) SELECT %s, %s::jsonb, NULL FROM job"
)
_POSTGRES_WINDOW = (
    f"WITH held AS ({unique.TAKE_POSTGRES}), job AS ({_COLUMNS} SELECT {_ROW} FROM held"
    " RETURNING id)"
    " INSERT INTO echomq_outbox (stream, record, xact) SELECT %s, %s::jsonb, NULL FROM job"
)
_POSTGRES_MANY = (
    "WITH v AS MATERIALIZED (SELECT * FROM json_to_recordset(%s::json) AS v("
    " id uuid, queue text, task_path text, arguments text, priority smallint,"
    " run_after timestamptz, state text, max_attempts integer, options text,"
    " enqueued_at timestamptz, unique_key text, group_key text, group_limit integer,"
    f" retention float8, record jsonb)), job AS ({_COLUMNS}"
    " SELECT id, queue, task_path, arguments::jsonb, priority, run_after, state, 0, max_attempts,"
    " options::jsonb, 0, '', enqueued_at, '', '[]', '', '', unique_key, group_key, group_limit,"
    " retention, false FROM v)"
    # Ids of a process ascend.
    " INSERT INTO echomq_outbox (stream, record, xact) SELECT %s, record, NULL FROM v ORDER BY id"
)
BATCH = 1_000
"""Jobs to a statement."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What is enqueued."""

    queue: str
    task_path: str
    arguments: str
    """JSON text of `{"args": [...], "kwargs": {...}}`."""
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


def enqueue(using: str, new: NewJob) -> Enqueued:
    """Write a job, and its record; tell of both after the commit.

    A unique job of whose key there is one gives that one, and writes nothing.
    """
    at = now()
    entry, run_after = _entry(new, at)
    while not _insert(using, new, entry, at, run_after):
        # The holder may end between the two statements: then it is our turn.
        holder = unique.holder(using, new.unique_key, window=new.unique_for is not None)
        if holder is not None:
            return Enqueued(
                id=str(holder.id),
                state=holder.state,
                enqueued_at=holder.enqueued_at,
                duplicate=True,
            )
    after_commit(using, partial(_tell, [entry]))
    return _enqueued(entry, at)


def enqueue_many(using: str, jobs: Sequence[NewJob]) -> list[Enqueued]:
    """Write jobs of one queue that aren't unique, all or none; see `enqueue`."""
    at = now()
    connection = connections[using]
    entries: list[Entry] = []
    with transaction.atomic(using=using, savepoint=False), connection.cursor() as cursor:
        for start in range(0, len(jobs), BATCH):
            made = [(new, *_entry(new, at)) for new in jobs[start : start + BATCH]]
            rows = [_row(connection, new, entry, at, due) for new, entry, due in made]
            told = [entry for _, entry, _ in made]
            if connection.vendor == "postgresql":
                text = msgspec.json.encode(
                    [
                        _WithRecord(*astuple(row), record=_record(entry))
                        for row, entry in zip(rows, told, strict=True)
                    ]
                )
                cursor.execute(_POSTGRES_MANY, (text.decode(), queue_stream(jobs[0].queue)))
            else:
                cursor.executemany(_INSERT, [astuple(row) for row in rows])
                journal.write(using, told)
            entries += told
    after_commit(using, partial(_tell, entries))
    return [_enqueued(entry, at) for entry in entries]


def _entry(new: NewJob, at: dt.datetime) -> tuple[Entry, dt.datetime]:
    """Give a job its id and state; return its record, and when it is due."""
    later = new.run_after is not None and new.run_after > at
    # A time in the past would overtake jobs that wait already.
    run_after = new.run_after if later and new.run_after is not None else at
    job_id = new_job_id()
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


def _enqueued(entry: Entry, at: dt.datetime) -> Enqueued:
    return Enqueued(id=entry.data["id"], state=JobState(entry.data["state"]), enqueued_at=at)


class _Row(msgspec.Struct):
    """The parameters of `_ROW`, in its order."""

    id: str
    queue: str
    task_path: str
    arguments: str
    priority: int
    run_after: Any
    state: str
    max_attempts: int
    options: str
    enqueued_at: Any
    unique_key: str
    group_key: str
    group_limit: int | None
    retention: float | None


class _WithRecord(_Row, kw_only=True):
    """A row for `_POSTGRES_MANY`, and the record of it."""

    record: dict[str, Any]


def _row(
    connection: Any, new: NewJob, entry: Entry, at: dt.datetime, run_after: dt.datetime
) -> _Row:
    return _Row(
        id=f"{entry.job_id.int:032x}",
        queue=new.queue,
        task_path=new.task_path,
        arguments=new.arguments,
        priority=new.priority,
        run_after=stored(run_after, connection),
        state=entry.data["state"],
        max_attempts=new.max_attempts,
        options=new.options,
        enqueued_at=stored(at, connection),
        unique_key="" if new.unique_for is not None else new.unique_key,
        group_key=new.group_key,
        group_limit=new.group_limit,
        retention=new.retention,
    )


def _record(entry: Entry) -> dict[str, Any]:
    return {"type": entry.event, "key": entry.data["id"], "data": entry.data}


def _insert(using: str, new: NewJob, entry: Entry, at: dt.datetime, run_after: dt.datetime) -> bool:
    """Write the job and its record; False if its key is taken, and then nothing."""
    connection = connections[using]
    window = new.unique_for is not None and bool(new.unique_key)
    row = astuple(_row(connection, new, entry, at, run_after))
    if connection.vendor == "postgresql":
        told = (queue_stream(new.queue), msgspec.json.encode(_record(entry)).decode())
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
        cursor.execute(f"{_INSERT} ON CONFLICT DO NOTHING" if new.unique_key else _INSERT, row)
        if not cursor.rowcount:
            return False
        journal.write(using, [entry])
    return True


def _tell(entries: Sequence[Entry]) -> None:
    """Tell of jobs of one queue that are committed."""
    journal.publish(entries)
    if any(entry.data["state"] == JobState.READY for entry in entries):
        engine.notify(queue_wake_group(entries[0].queue))
