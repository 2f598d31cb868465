"""The statements that write the log.

On PostgreSQL everything is one call of a function, so an append outside a transaction
is one statement and one round trip. SQLite's way is in `appending_sqlite`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..core.ids import EventId
from ..core.records import Receipt
from ..exceptions import WrongExpectedCursor
from . import appending_sqlite
from .paging import BEYOND
from .stream import insert_stream
from .times import aware, time_column
from .transactions import as_statement, naming_isolation, own_transaction

_CALL_BYTES = 8_000_000
_CALL_RECORDS = 5_000

# One row for all receipts: made into rows of their own, they took as long to read as the records
# to encode. Only duplicates have a time of their own.
_APPEND = (
    "SELECT min(epoch), min(write_cursor), string_agg(uuid_send(id), ''::bytea ORDER BY n),"
    f" {time_column('postgresql', 'min(recorded_at) FILTER (WHERE NOT duplicate)')},"
    " array_agg(n ORDER BY n) FILTER (WHERE duplicate),"
    f" array_agg({time_column('postgresql', 'recorded_at')} ORDER BY n) FILTER (WHERE duplicate)"
    " FROM echomq_append_v1(%s, %s::jsonb, %s)"
)
_ID_BYTES = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """What a call answered: ids one after the other, in bytes, and the times of duplicates."""

    stream: str
    epoch: str
    ids: bytes
    at: dt.datetime | None
    earlier: dict[int, dt.datetime]

    def receipts(self) -> list[Receipt]:
        from_int, from_bytes, ids = EventId.from_int, int.from_bytes, self.ids
        times: list[Any] = [self.at] * (len(ids) // _ID_BYTES)
        for index, at in self.earlier.items():
            times[index] = at
        return [
            Receipt(
                id=(id := from_int(from_bytes(ids[start : start + _ID_BYTES]))),
                stream=self.stream,
                position=id.position,
                epoch=self.epoch,
                recorded_at=at,
                duplicate=start // _ID_BYTES in self.earlier,
            )
            for at, start in zip(times, range(0, len(ids), _ID_BYTES), strict=True)
        ]


def append(
    using: str, name: str, encoded: Sequence[bytes], expected_cursor: int | None = None
) -> list[Receipt]:
    """Append JSON objects made by `core.records.encode_record`, all or none.

    In the caller's transaction if there is one. Raises `WrongExpectedCursor`,
    `IsolationError`, `DatabaseLocked`; after the last two, the caller's transaction can
    only be rolled back.
    """
    if not encoded:
        return []
    connection = connections[using]
    if connection.vendor == "sqlite":
        return appending_sqlite.append(connection, name, encoded, expected_cursor)
    calls = list(_split(encoded))
    if len(calls) == 1:
        outcome = as_statement(using, lambda: _call(connection, name, calls[0], expected_cursor))
    else:
        with own_transaction(using):
            outcome = _call_each(connection, name, calls, expected_cursor)
    if isinstance(outcome, WrongExpectedCursor):
        raise outcome
    return outcome


def append_on_commit(
    using: str, name: str, encoded: Sequence[bytes], lock_timeout: float
) -> list[Receipt] | None:
    """Leave records to be appended when the transaction commits."""
    connection = connections[using]
    if connection.vendor == "sqlite":
        return append(using, name, encoded)
    calls = list(_split(encoded))
    # One statement is a transaction; several have to be made one.
    together = own_transaction(using) if len(calls) > 1 else nullcontext()
    with together, connection.cursor() as cursor:
        for call in calls:
            cursor.execute(
                "SELECT echomq_append_on_commit_v1(%s, %s::jsonb, %s)",
                (name, call.decode(), max(1, int(lock_timeout * 1000))),
            )
    return None


def ensure(using: str, name: str) -> None:
    """Create the stream's row if it isn't there."""
    connection = connections[using]
    with transaction.atomic(using=using, savepoint=False), connection.cursor() as cursor:
        insert_stream(cursor, connection, name)


def _call(
    connection: BaseDatabaseWrapper, name: str, call: bytes, expected_cursor: int | None
) -> list[Receipt] | WrongExpectedCursor:
    expected = None if expected_cursor is None else min(expected_cursor, BEYOND)
    with naming_isolation(name), connection.cursor() as cursor:
        cursor.execute(_APPEND, (name, call.decode(), expected))
        epoch, write_cursor, ids, at, duplicates, their_times = cursor.fetchone()
    if ids is None:
        return WrongExpectedCursor(
            stream=name, expected=expected_cursor or 0, write_cursor=write_cursor
        )
    written = _Written(
        stream=name,
        epoch=epoch,
        ids=ids,
        at=None if at is None else aware(at, connection.timezone),
        earlier={
            n - 1: aware(time, connection.timezone)
            for n, time in zip(duplicates or (), their_times or (), strict=True)
        },
    )
    return written.receipts()


def _call_each(
    connection: BaseDatabaseWrapper, name: str, calls: list[bytes], expected_cursor: int | None
) -> list[Receipt] | WrongExpectedCursor:
    receipts: list[Receipt] = []
    for call in calls:
        outcome = _call(connection, name, call, expected_cursor)
        if isinstance(outcome, WrongExpectedCursor):
            return outcome  # nothing was written: what came before were duplicates
        receipts += outcome
        if not all(receipt.duplicate for receipt in outcome):
            expected_cursor = None  # from here on the write cursor moved because of us
    return receipts


def _split(encoded: Sequence[bytes]) -> Iterator[bytes]:
    """Join records to JSON arrays that one call takes well."""
    start = size = 0
    for index, record in enumerate(encoded):
        full = size + len(record) > _CALL_BYTES or index - start == _CALL_RECORDS
        if index > start and full:
            yield b"[" + b",".join(encoded[start:index]) + b"]"
            start, size = index, 0
        size += len(record)
    yield b"[" + b",".join(encoded[start:]) + b"]"
