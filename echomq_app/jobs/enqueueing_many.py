"""Enqueue many jobs of one task that aren't unique: a statement for a thousand of them.

They differ by their ids and arguments alone. On PostgreSQL only these are sent for each, and
while the server writes one batch, the next one is made here (libpq's pipeline mode).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import msgspec
from django.db import connections, transaction

from ..core.event import WireEvent
from ..core.ids import JobId, new_job_ids
from ..core.names import queue_stream
from ..models import appending
from ..models.job import JobState
from ..models.times import now, stored
from ..models.transactions import after_commit
from . import journal
from .enqueueing import COLUMNS, INSERT, NewJob, first_entry, record_of, wake

BATCH = 500
"""Jobs to a statement."""

_POSTGRES = (
    "WITH v AS MATERIALIZED (SELECT v.job, v.id::uuid AS id, v.arguments FROM ROWS FROM ("
    " json_array_elements_text(%s::json), json_array_elements_text(%s::json),"
    " json_array_elements(%s::json)) AS v(job, id, arguments)),"
    f" job AS ({COLUMNS} SELECT id, %s, %s, arguments::jsonb, %s, %s, %s, 0, %s, %s, 0, '', %s,"
    " '', '[]', '', '', '', %s, %s, %s, false FROM v)"
    # Ids of a process ascend. The outbox wants a transaction that has a number.
    " INSERT INTO echomq_outbox (stream, record, xact) SELECT %s,"
    " (%s::text || job || %s::text || job || %s::text)::jsonb, NULL FROM v"
    " WHERE pg_current_xact_id() IS NOT NULL ORDER BY id"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnqueuedBatch:
    """A part of them, in the order of the arguments."""

    ids: list[str]
    arguments: list[bytes]
    state: JobState
    enqueued_at: dt.datetime


def enqueue_many(using: str, new: NewJob, arguments: Iterable[bytes]) -> Iterator[EnqueuedBatch]:
    """Write a job for each of `arguments` (JSON text), all or none; see `enqueue`.

    Each batch comes when it has been sent, not when it is written: what the caller makes of it
    meanwhile costs no time. All is written when the iteration has ended; an error, also one
    of `arguments` or of the caller, takes all back.
    """
    at = now()
    connection = connections[using]
    write = _write_postgres if connection.vendor == "postgresql" else _write_sqlite
    common: _Common | None = None
    told: list[str] = []
    with transaction.atomic(using=using), _pipeline(connection):
        for batch in _batches(arguments):
            ids = new_job_ids(len(batch))
            if common is None:
                common = _Common.of(connection, new, ids[0], at)
            texts = [str(job_id) for job_id in ids]
            write(connection, common, ids, texts, batch)
            told += texts
            yield EnqueuedBatch(ids=texts, arguments=batch, state=common.state, enqueued_at=at)
    if common is not None:
        after_commit(using, partial(_tell, common, told))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What the jobs have in common."""

    queue: str
    state: JobState
    row: tuple[Any, ...]
    """From `queue` on, without arguments and unique key."""
    record: list[str]
    """What is before, between and after the two times that an id is in each record."""

    @classmethod
    def of(cls, connection: Any, new: NewJob, first: JobId, at: dt.datetime) -> Self:
        entry, run_after = first_entry(new, first, at)
        row = (
            new.queue,
            new.task_path,
            new.priority,
            stored(run_after, connection),
            entry.data["state"],
            new.max_attempts,
            new.options,
            stored(at, connection),
            new.group_key,
            new.group_limit,
            new.retention,
        )
        record = msgspec.json.encode(record_of(entry)).decode().split(entry.data["id"])
        return cls(queue=new.queue, state=JobState(entry.data["state"]), row=row, record=record)


def _batches(arguments: Iterable[bytes]) -> Iterator[list[bytes]]:
    left = iter(arguments)
    while batch := list(itertools.islice(left, BATCH)):
        yield batch


def _write_postgres(
    connection: Any,
    common: _Common,
    ids: list[JobId],
    texts: list[str],
    arguments: list[bytes],
) -> None:
    # JSON text of each column: psycopg would quote every value of a list by itself.
    hexes = [f"{job_id.int:032x}" for job_id in ids]
    columns = (
        '["' + '","'.join(texts) + '"]',
        '["' + '","'.join(hexes) + '"]',
        "[" + b",".join(arguments).decode() + "]",
    )
    with connection.cursor() as cursor:
        stream = queue_stream(common.queue)
        cursor.execute(_POSTGRES, (*columns, *common.row, stream, *common.record))


def _write_sqlite(
    connection: Any,
    common: _Common,
    ids: list[JobId],
    texts: list[str],
    arguments: list[bytes],
) -> None:
    queue, path, *middle, group, limit, retention = common.row
    with connection.cursor() as cursor:
        cursor.executemany(
            INSERT,
            [
                (job_id.hex, queue, path, text.decode(), *middle, "", group, limit, retention)
                for job_id, text in zip(ids, arguments, strict=True)
            ],
        )
    records = [text.join(common.record).encode() for text in texts]
    appending.append(connection.alias, queue_stream(queue), records)


def _pipeline(connection: Any) -> AbstractContextManager[Any]:
    """Have statements sent without waiting for each one's answer, where that can be."""
    if connection.vendor != "postgresql":
        return contextlib.nullcontext()
    connection.ensure_connection()
    stack = contextlib.ExitStack()
    pipeline = getattr(connection.connection, "pipeline", None)  # psycopg 3
    if pipeline is not None:
        stack.enter_context(connection.wrap_database_errors)
        stack.enter_context(pipeline())
    return stack


def _tell(common: _Common, texts: list[str]) -> None:
    rest = common.record[2].removesuffix("}")  # of the record; what is left ends its data
    wire: list[WireEvent] = [
        {"event": journal.ENQUEUED, "job_id": text, "data": f'{{"id":"{text}{rest}'}
        for text in texts
    ]
    journal.publish_wire(common.queue, wire)
    wake(common.queue, common.state)
