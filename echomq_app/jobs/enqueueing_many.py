"""Enqueue many jobs of one task that aren't unique: a statement for hundreds of them.

They differ by their ids and arguments alone. On PostgreSQL only these are sent for each, and
while the server writes one batch, the next one is made here (libpq's pipeline mode).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import msgspec
from django.db import connections, transaction

from ..core.event import WireEvent
from ..core.ids import JobId, job_texts, new_job_numbers
from ..core.names import queue_stream
from ..models.job import JobState
from ..models.relaying import KEYS
from ..models.times import now
from ..models.transactions import after_commit
from . import journal
from .arguments import Batch
from .enqueueing import COLUMNS, COMMON, INSERT, NewJob, common_row, first_entry, wake
from .journal import Entry

_POSTGRES = (
    "WITH v AS MATERIALIZED (SELECT v.id::uuid AS id, v.arguments FROM ROWS FROM ("
    " json_array_elements_text(%s::json), json_array_elements(%s::json)) AS v(id, arguments)),"
    f" job AS ({COLUMNS} SELECT id, arguments::jsonb, '', {COMMON} FROM v)"
    # The outbox wants a transaction that has a number.
    " INSERT INTO echomq_outbox (stream, record, keys, xact) SELECT %s, %s::jsonb, k.keys, NULL"
    " FROM json_array_elements_text(%s::json) WITH ORDINALITY AS k(keys, n)"
    " WHERE pg_current_xact_id() IS NOT NULL ORDER BY k.n"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EnqueuedBatch:
    """A part of them, in the order of the arguments."""

    ids: list[str]
    arguments: bytes
    """JSON array."""
    state: JobState
    enqueued_at: dt.datetime


def enqueue_many(using: str, new: NewJob, batches: Iterable[Batch]) -> Iterator[EnqueuedBatch]:
    """Write a job for each call, all or none; see `enqueue`.

    Each batch comes when it has been sent, not when it is written: what the caller makes of it
    meanwhile costs no time. All is written when the iteration has ended; an error, also one
    of `batches` or of the caller, takes all back.
    """
    at = now()
    connection = connections[using]
    write = _write_postgres if connection.vendor == "postgresql" else _write_sqlite
    common: _Common | None = None
    told: list[str] = []
    with transaction.atomic(using=using), _pipeline(connection):
        for batch in batches:
            numbers = new_job_numbers(batch.calls)
            if common is None:
                common = _Common.of(connection, new, JobId.from_int(numbers[0]), at)
            texts = job_texts(numbers)
            write(connection, common, numbers, texts, batch.text)
            told += texts
            yield EnqueuedBatch(ids=texts, arguments=batch.text, state=common.state, enqueued_at=at)
    if common is not None:
        after_commit(using, partial(_tell, common, told))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Common:
    """What the jobs have in common."""

    queue: str
    state: JobState
    row: tuple[Any, ...]
    """See `common_row`."""
    data: dict[str, Any]
    """Of the records, without the id."""

    @classmethod
    def of(cls, connection: Any, new: NewJob, first: JobId, at: dt.datetime) -> Self:
        entry, run_after = first_entry(new, first, at)
        state = JobState(entry.data["state"])
        row = common_row(connection, new, state.value, at, run_after)
        data = {name: value for name, value in entry.data.items() if name != "id"}
        return cls(queue=new.queue, state=state, row=row, data=data)


def _write_postgres(
    connection: Any, common: _Common, numbers: list[int], texts: list[str], arguments: bytes
) -> None:
    # JSON text of each column: psycopg would quote every value of a list by itself.
    ids = '["' + '","'.join([f"{number:032x}" for number in numbers]) + '"]'
    keys = [",".join(texts[n : n + KEYS]) for n in range(0, len(texts), KEYS)]
    record = {"type": journal.ENQUEUED, "data": common.data}
    told = (queue_stream(common.queue), _json(record), _json(keys))
    with connection.cursor() as cursor:
        cursor.execute(_POSTGRES, (ids, arguments.decode(), *common.row, *told))


def _write_sqlite(
    connection: Any, common: _Common, numbers: list[int], texts: list[str], arguments: bytes
) -> None:
    each = msgspec.json.decode(arguments, type=list[msgspec.Raw])
    with connection.cursor() as cursor:
        cursor.executemany(
            INSERT,
            [
                (f"{number:032x}", bytes(text).decode(), "", *common.row)
                for number, text in zip(numbers, each, strict=True)
            ],
        )
    entries = [
        Entry(common.queue, journal.ENQUEUED, JobId.from_int(number), {"id": text, **common.data})
        for number, text in zip(numbers, texts, strict=True)
    ]
    journal.write(connection.alias, entries)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


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
    rest = _json(common.data).removeprefix("{")
    wire: list[WireEvent] = [
        {"event": journal.ENQUEUED, "job_id": text, "data": f'{{"id":"{text}",{rest}'}
        for text in texts
    ]
    journal.publish_wire(common.queue, wire)
    wake(common.queue, common.state)
