"""Enqueue: the job and its `enqueued` record, in the caller's transaction.

One statement on PostgreSQL. Nothing is told to anybody before the commit; then the feed
hears of it, and the workers of the queue are woken.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from functools import partial
from typing import Any

import msgspec
from django.db import connections, transaction

from .. import engine
from ..core.ids import new_job_id
from ..core.names import queue_stream, queue_wake_group
from ..models.job import JobState
from ..models.times import now, stored
from ..models.transactions import after_commit
from . import journal
from .journal import Entry

_COLUMNS = (
    "INSERT INTO echomq_job (id, queue, task_path, arguments, priority, run_after, state,"
    " attempt, max_attempts, options, fence, worker_name, enqueued_at, progress_note, errors,"
    " cancel_reason)"
)
_VALUES = " VALUES (%s, %s, %s, %s, %s, %s, %s, 0, %s, %s, 0, '', %s, '', '[]', '')"
_SQLITE = _COLUMNS + _VALUES
_POSTGRES = (
    f"WITH job AS ({_COLUMNS}{_VALUES})"
    " INSERT INTO echomq_outbox (stream, record, xact) VALUES (%s, %s, NULL)"
)


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Enqueued:
    """What came of it."""

    id: str
    state: JobState
    enqueued_at: dt.datetime


def enqueue(using: str, new: NewJob) -> Enqueued:
    """Write a job, and its record; tell of both after the commit."""
    at = now()
    later = new.run_after is not None and new.run_after > at
    state = JobState.SCHEDULED if later else JobState.READY
    # A time in the past would overtake jobs that wait already.
    run_after = new.run_after if later and new.run_after is not None else at
    job_id = new_job_id()
    moment = journal.timestamp(at)
    data: dict[str, Any] = {
        "id": str(job_id),
        "task": new.task_path,
        "state": state.value,
        "attempt": 0,
        "at": moment,
        "priority": new.priority,
        "run_after": moment if run_after is at else journal.timestamp(run_after),
    }
    entry = Entry(new.queue, journal.ENQUEUED, job_id, data)
    _insert(using, new, entry, at, run_after)
    after_commit(using, partial(_tell, entry))
    return Enqueued(id=data["id"], state=state, enqueued_at=at)


def _insert(using: str, new: NewJob, entry: Entry, at: dt.datetime, run_after: dt.datetime) -> None:
    connection = connections[using]
    row = (
        entry.job_id.hex,
        new.queue,
        new.task_path,
        new.arguments,
        new.priority,
        stored(run_after, connection),
        entry.data["state"],
        new.max_attempts,
        new.options,
        stored(at, connection),
    )
    if connection.vendor == "postgresql":
        record = {"type": entry.event, "key": entry.data["id"], "data": entry.data}
        with connection.cursor() as cursor:
            cursor.execute(
                _POSTGRES,
                (*row, queue_stream(new.queue), msgspec.json.encode(record).decode()),
            )
        return
    with transaction.atomic(using=using, savepoint=False), connection.cursor() as cursor:
        cursor.execute(_SQLITE, row)  # a write first: it takes the write lock
        journal.write(using, [entry])


def _tell(entry: Entry) -> None:
    journal.publish([entry])
    if entry.data["state"] == JobState.READY:
        engine.notify(queue_wake_group(entry.queue))
