"""The log's writing on SQLite: plain statements, of which the first is a write.

It takes the write lock, honouring the timeout, before anything was read; so no later
statement can find its snapshot too old, in a deferred transaction of the caller's either.
"""

from __future__ import annotations

import datetime as dt
import random
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from django.db import OperationalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..core.ids import EventId, event_id
from ..core.records import Receipt
from ..exceptions import DatabaseLocked, WrongExpectedCursor
from .stream import insert_stream
from .times import aware, now, stored

_LOCKED = "database is locked"
_TABLE_LOCKED = "table is locked"
_UNIX_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MILLISECOND = dt.timedelta(milliseconds=1)


def append(
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
                made = insert_stream(cursor, connection, name)
                outcome = _write_sqlite(cursor, connection, name, records, expected_cursor)
                if made and isinstance(outcome, WrongExpectedCursor):
                    cursor.execute("DELETE FROM echomq_stream WHERE name = %s", (name,))
    except OperationalError as error:
        if _TABLE_LOCKED in str(error):
            raise DatabaseLocked(
                f"append to {name!r}: another thread uses {connection.alias!r}, a database in "
                "memory, where SQLite doesn't wait; nothing was written. Tests with threads need "
                f"a file: DATABASES[{connection.alias!r}]['TEST'] = {{'NAME': 'test.sqlite3'}}."
            ) from error
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
            # In the partial index's own words: SQLite doesn't see that `<> ''` means the same.
            " WHERE stream_id = %s AND NOT (idempotency_key = '') AND idempotency_key IN ("
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
