"""The statements that write the log.

On PostgreSQL everything is one call of a function, so an append outside a transaction
is one statement and one round trip. On SQLite they are plain statements, of which the
first is a write: it takes the write lock (honouring the timeout) before anything was
read, so no later statement can find its snapshot too old.
"""

from __future__ import annotations

import datetime as dt
import random
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from django.db import OperationalError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..core.ids import EventId, event_id
from ..core.records import Receipt
from ..exceptions import DatabaseLocked, WrongExpectedCursor
from .stream import new_epoch
from .times import aware, now, stored
from .transactions import as_statement, naming_isolation, own_transaction

_CALL_BYTES = 8_000_000
_CALL_RECORDS = 5_000
_LOCKED = "database is locked"

_APPEND = (
    "SELECT n, id, position, recorded_at, duplicate, epoch, write_cursor"
    " FROM echomq_append_v1(%s, %s::jsonb, %s) ORDER BY n"
)


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
        return _append_sqlite(connection, name, encoded, expected_cursor)
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
    with connection.cursor() as cursor:
        for call in _split(encoded):
            cursor.execute(
                "SELECT echomq_append_on_commit_v1(%s, %s::jsonb, %s)",
                (name, call, max(1, int(lock_timeout * 1000))),
            )
    return None


def ensure(using: str, name: str) -> None:
    """Create the stream's row if it isn't there."""
    connection = connections[using]
    with connection.cursor() as cursor:
        _insert_stream(cursor, connection, name)


def relay(using: str, name: str, at_most: int) -> int | None:
    """Move committed outbox rows of a stream into it; `None`: somebody else is at it."""
    connection = connections[using]
    if connection.vendor == "sqlite":
        return 0

    def call() -> int | None:
        with naming_isolation(name), connection.cursor() as cursor:
            cursor.execute("SELECT echomq_relay_v1(%s, %s)", (name, at_most))
            moved: int | None = cursor.fetchone()[0]
        return moved

    return as_statement(using, call)


def _call(
    connection: BaseDatabaseWrapper, name: str, call: bytes, expected_cursor: int | None
) -> list[Receipt] | WrongExpectedCursor:
    with naming_isolation(name), connection.cursor() as cursor:
        cursor.execute(_APPEND, (name, call.decode(), expected_cursor))
        rows = cursor.fetchall()
    if rows[0][2] is None:
        return WrongExpectedCursor(
            stream=name, expected=expected_cursor or 0, write_cursor=rows[0][6]
        )
    zone = connection.timezone
    return [
        Receipt(
            id=EventId.from_uuid(id),
            stream=name,
            position=position,
            epoch=epoch,
            recorded_at=aware(at, zone),
            duplicate=duplicate,
        )
        for _, id, position, at, duplicate, epoch, _ in rows
    ]


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


def _append_sqlite(
    connection: BaseDatabaseWrapper,
    name: str,
    encoded: Sequence[bytes],
    expected_cursor: int | None,
) -> list[Receipt]:
    records = [msgspec.json.decode(record, type=_Stored) for record in encoded]
    try:
        # No savepoint: a conflict is decided before anything is written.
        with transaction.atomic(using=connection.alias, savepoint=False):
            with connection.cursor() as cursor:
                # A write first, even if the row is there: it takes the write lock.
                _insert_stream(cursor, connection, name)
                outcome = _write_sqlite(cursor, connection, name, records, expected_cursor)
    except OperationalError as error:
        if _LOCKED not in str(error):
            raise
        raise DatabaseLocked(
            f"append to {name!r}: SQLite refused the write lock, nothing was written. If this "
            "transaction read before it wrote, set OPTIONS['transaction_mode'] = 'IMMEDIATE' for "
            f"{connection.alias!r}; if writers are slow, raise OPTIONS['timeout']."
        ) from error
    if isinstance(outcome, WrongExpectedCursor):
        raise outcome
    return outcome


class _Stored(msgspec.Struct):
    data: msgspec.Raw
    type: str = ""
    key: str = ""
    headers: msgspec.Raw = msgspec.Raw(b"{}")
    idempotency_key: str = ""


def _insert_stream(cursor: Any, connection: BaseDatabaseWrapper, name: str) -> None:
    cursor.execute(
        "INSERT INTO echomq_stream (name, epoch, first_position, created_at)"
        " VALUES (%s, %s, 0, %s) ON CONFLICT (name) DO NOTHING",
        (name, new_epoch(), stored(now(), connection)),
    )


def _write_sqlite(
    cursor: Any,
    connection: BaseDatabaseWrapper,
    name: str,
    records: list[_Stored],
    expected_cursor: int | None,
) -> list[Receipt] | WrongExpectedCursor:
    cursor.execute("SELECT id, epoch, first_position FROM echomq_stream WHERE name = %s", (name,))
    stream_id, epoch, first = cursor.fetchone()
    cursor.execute(
        "SELECT position, recorded_at FROM echomq_record"
        " WHERE stream_id = %s AND position >= %s ORDER BY position DESC LIMIT 1",
        (stream_id, first),
    )
    last = cursor.fetchone()
    base = first if last is None else last[0] + 1
    at = now()
    if last is not None:
        at = max(at, aware(last[1], connection.timezone))
    known = _known_keys(cursor, connection, stream_id, name, epoch, records)

    receipts: list[Receipt] = []
    rows: list[tuple[Any, ...]] = []
    column_at = stored(at, connection)
    for record in records:
        earlier = known.get(record.idempotency_key)
        if earlier is not None:
            receipts.append(msgspec.structs.replace(earlier, duplicate=True))
            continue
        receipt = Receipt(
            id=event_id(_milliseconds(at), base + len(rows), random.getrandbits(32)),
            stream=name,
            position=base + len(rows),
            epoch=epoch,
            recorded_at=at,
        )
        rows.append(_row(stream_id, receipt, record, column_at))
        receipts.append(receipt)
        if record.idempotency_key:
            known[record.idempotency_key] = receipt
    if rows and expected_cursor is not None and expected_cursor != base:
        return WrongExpectedCursor(stream=name, expected=expected_cursor, write_cursor=base)
    cursor.executemany(
        "INSERT INTO echomq_record (id, stream_id, position, type, key, data, headers,"
        " idempotency_key, recorded_at) VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
        rows,
    )
    return receipts


def _row(stream_id: int, receipt: Receipt, record: _Stored, at: Any) -> tuple[Any, ...]:
    return (
        receipt.id.hex,
        stream_id,
        receipt.position,
        record.type,
        record.key,
        bytes(record.data).decode(),
        bytes(record.headers).decode(),
        record.idempotency_key,
        at,
    )


def _known_keys(
    cursor: Any,
    connection: BaseDatabaseWrapper,
    stream_id: int,
    name: str,
    epoch: str,
    records: list[_Stored],
) -> dict[str, Receipt]:
    keys = [record.idempotency_key for record in records if record.idempotency_key]
    known: dict[str, Receipt] = {}
    for start in range(0, len(keys), 500):
        some = keys[start : start + 500]
        cursor.execute(
            "SELECT idempotency_key, id, position, recorded_at FROM echomq_record"
            " WHERE stream_id = %s AND idempotency_key <> '' AND idempotency_key IN ("
            + ", ".join(["%s"] * len(some))
            + ")",
            (stream_id, *some),
        )
        for key, id, position, at in cursor.fetchall():
            known[key] = Receipt(
                id=EventId.from_uuid(uuid.UUID(id)),
                stream=name,
                position=position,
                epoch=epoch,
                recorded_at=aware(at, connection.timezone),
            )
    return known


def _milliseconds(at: dt.datetime) -> int:
    return (at - _UNIX_EPOCH) // _MILLISECOND


_UNIX_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MILLISECOND = dt.timedelta(milliseconds=1)
