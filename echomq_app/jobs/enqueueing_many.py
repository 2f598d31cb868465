"""Enqueue many jobs of one task that aren't unique: a statement for a thousand of them.

They differ by their ids and arguments alone. On PostgreSQL only these are sent for each, and
while the server writes one batch, the next one is made here (libpq's pipeline mode).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

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
class EnqueuedMany:
    """What came of it, in the order of the arguments."""

    ids: list[str]
    state: JobState
    enqueued_at: dt.datetime


def enqueue_many(using: str, new: NewJob, arguments: Sequence[bytes]) -> EnqueuedMany:
    """Write a job for each of `arguments` (JSON text), all or none; see `enqueue`."""
    at = now()
    ids = new_job_ids(len(arguments))
    texts = [str(job_id) for job_id in ids]
    entry, run_after = first_entry(new, ids[0], at)
    # What the records of the jobs have in common: an id is twice in each.
    common = msgspec.json.encode(record_of(entry)).decode().split(texts[0])
    connection = connections[using]
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
    write = _write_postgres if connection.vendor == "postgresql" else _write_sqlite
    with transaction.atomic(using=using, savepoint=False), _pipeline(connection):
        for start in range(0, len(ids), BATCH):
            batch = slice(start, start + BATCH)
            write(connection, row, common, ids[batch], texts[batch], arguments[batch])
    after_commit(using, partial(_tell, entry.queue, entry.data["state"], common, texts))
    return EnqueuedMany(ids=texts, state=JobState(entry.data["state"]), enqueued_at=at)


def _write_postgres(
    connection: Any,
    row: tuple[Any, ...],
    common: list[str],
    ids: list[JobId],
    texts: list[str],
    arguments: Sequence[bytes],
) -> None:
    # JSON text of each column: psycopg would quote every value of a list by itself.
    hexes = [f"{job_id.int:032x}" for job_id in ids]
    columns = (
        '["' + '","'.join(texts) + '"]',
        '["' + '","'.join(hexes) + '"]',
        "[" + b",".join(arguments).decode() + "]",
    )
    with connection.cursor() as cursor:
        cursor.execute(_POSTGRES, (*columns, *row, queue_stream(row[0]), *common))


def _write_sqlite(
    connection: Any,
    row: tuple[Any, ...],
    common: list[str],
    ids: list[JobId],
    texts: list[str],
    arguments: Sequence[bytes],
) -> None:
    queue, path, *middle, group, limit, retention = row
    with connection.cursor() as cursor:
        cursor.executemany(
            INSERT,
            [
                (job_id.hex, queue, path, text.decode(), *middle, "", group, limit, retention)
                for job_id, text in zip(ids, arguments, strict=True)
            ],
        )
    appending.append(
        connection.alias, queue_stream(queue), [text.join(common).encode() for text in texts]
    )


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


def _tell(queue: str, state: str, common: list[str], texts: list[str]) -> None:
    rest = common[2].removesuffix("}")  # of the record; what is left ends its data
    wire: list[WireEvent] = [
        {"event": journal.ENQUEUED, "job_id": text, "data": f'{{"id":"{text}{rest}'}
        for text in texts
    ]
    journal.publish_wire(queue, wire)
    wake(queue, state)
