"""The statements that write the log.

On PostgreSQL everything is one call of a function, so an append outside a transaction
is one statement and one round trip. SQLite's way is in `appending_sqlite`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

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

_RECORDED_AT = time_column("postgresql", "recorded_at")
_APPEND = (
    f"SELECT n, uuid_send(id), position, {_RECORDED_AT}, duplicate, epoch, write_cursor"  # noqa: S608
    " FROM echomq_append_v1(%s, %s::jsonb, %s)"
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
    expected = None if expected_cursor is None else min(expected_cursor, BEYOND)
    with naming_isolation(name), connection.cursor() as cursor:
        cursor.execute(_APPEND, (name, call.decode(), expected))
        rows = cursor.fetchall()
    if rows[0][2] is None:
        return WrongExpectedCursor(
            stream=name, expected=expected_cursor or 0, write_cursor=rows[0][6]
        )
    rows.sort()  # by n: PostgreSQL promises no order without saying so, and says so slower
    zone = connection.timezone
    # Nearly always the same for all of a call; as bytes, an id is read in a third of the time.
    times = {at: aware(at, zone) for at in {row[3] for row in rows}}
    from_bytes, from_int = int.from_bytes, EventId.from_int
    return [
        Receipt(
            id=from_int(from_bytes(id)),
            stream=name,
            position=position,
            epoch=epoch,
            recorded_at=times[at],
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
