"""The statements that read the log.

A page is one statement, so its records, the oldest position, the write cursor and the
epoch are one snapshot: what a reader concludes from them was true at one moment.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Generic, Required, TypedDict, TypeVar, Unpack

import msgspec
from django.db import connections

from ..core.frames import stored_record, stored_rest
from ..core.ids import EventId
from ..core.payload import decode
from ..core.records import StoredRecord, StreamInfo, StreamRecord, token_of
from ..core.tokens import Place
from ..exceptions import UndecodableRecord, UnknownStream
from .times import aware, in_utc, now, time_column

# The write cursor is looked up at or above first_position only: below it, a trim under a held
# snapshot leaves dead index entries that made this look-up a hundred times as slow.
_WRITE_CURSOR = {
    "postgresql": """greatest(s.first_position, coalesce((
        SELECT w.position + 1 FROM echomq_record w
        WHERE w.stream_id = s.id AND w.position >= s.first_position
        ORDER BY w.position DESC LIMIT 1), 0))""",
    "sqlite": """max(s.first_position, coalesce((
        SELECT w.position + 1 FROM echomq_record w
        WHERE w.stream_id = s.id AND w.position >= s.first_position
        ORDER BY w.position DESC LIMIT 1), 0))""",
}
# On PostgreSQL the head is a row of its own: computed, sent and parsed once. With each record
# it took as long as the records. The rows come in any order.
_PAGE = {
    "postgresql": """
        WITH s AS MATERIALIZED (
            SELECT s.id, {head} FROM echomq_stream s WHERE s.name = %s
        )
        SELECT s.epoch, s.first_position, s.write_cursor, s.before, s.pending, s.end_position,
               s.end_id, NULL, NULL, {nothing}
        FROM s
        UNION ALL
        SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, r.id, r.position, {columns}
        FROM s CROSS JOIN LATERAL (
            SELECT * FROM echomq_record r
            WHERE r.stream_id = s.id AND {where} ORDER BY r.position LIMIT %s
        ) r""",
    "sqlite": """
        SELECT {head}, r.id, r.position, {columns}
        FROM echomq_stream s LEFT JOIN echomq_record r ON r.stream_id = s.id AND {where}
        WHERE s.name = %s ORDER BY r.position LIMIT %s""",
}
_COLUMNS = {
    vendor: ("r.type", "r.key", "r.data", "r.headers", time_column(vendor, "r.recorded_at"))
    for vendor in ("postgresql", "sqlite")
}
# All that a page is sent of a record but its id, made there: see `core.frames.stored_rest`.
_REST = """
    '"position":' || r.position || ',"type":' || to_json(r.type) || ',"key":' || to_json(r.key)
    || ',"data":' || r.data || ',"headers":' || r.headers || ',"recorded_at":'
    || left(to_json(r.recorded_at AT TIME ZONE 'UTC')::text, -1) || '+00:00"'"""
_STORED_COLUMNS = {"postgresql": (_REST,), "sqlite": _COLUMNS["sqlite"]}
_BIGINT = {"postgresql": "%s::bigint", "sqlite": "%s"}
_GREATEST = {"postgresql": "greatest", "sqlite": "max"}
_LEAST = {"postgresql": "least", "sqlite": "min"}
_PENDING = {
    # A range of one name: where `=` may find many rows, PostgreSQL scans the outbox for any.
    "postgresql": (
        "EXISTS (SELECT FROM echomq_outbox o WHERE o.stream >= s.name AND o.stream <= s.name)"
    ),
    "sqlite": "0",
}


BEYOND = 2**62
"""Above every position, and one that a column of positions can hold."""

_EVERYTHING = BEYOND // 2
"""As a window: all positions. Added to `BEYOND` it still fits."""


R = TypeVar("R", bound=StreamRecord | StoredRecord)
S = TypeVar("S", bound=StoredRecord)
Row = tuple[Any, ...]


class Snapshot(msgspec.Struct, Generic[R], frozen=True, kw_only=True):
    """A page as the database gave it, before anybody decided whether it is valid."""

    place: Place
    records: list[R]
    end_cursor: int
    """Where to go on: past the last record, and past what a filter skipped."""
    end_tail: str
    pending: bool
    """Rows of this stream wait in the outbox: the relay has work. Only looked for if asked."""
    undecodable: UndecodableRecord | None = None
    """The record at `end_cursor`, if it can't be decoded."""


class Options(TypedDict, total=False):
    """What a page holds: the first `limit` records that match, of at most `window` positions."""

    limit: Required[int]
    window: Required[int]
    types: Collection[str] | None
    key: str | None
    with_pending: bool


def read_page(
    using: str, name: str, cursor: int | None, **options: Unpack[Options]
) -> Snapshot[StreamRecord]:
    """Read at most `limit` records at or above `cursor` (`None`: the oldest retained).

    With a filter, at most `window` positions are scanned, so that a filter that matches
    nothing still returns soon, with a cursor that moved. Raises `UnknownStream`.
    """
    zone = connections[using].timezone

    def build(epoch: str, row: Row) -> StreamRecord:
        return _record(name, epoch, zone, row)

    return _read(using, name, cursor, build, _COLUMNS, **options)


def read_stored_page(
    using: str,
    name: str,
    cursor: int | None,
    kind: Callable[[int, int, msgspec.Raw], S],
    **options: Unpack[Options],
) -> Snapshot[S]:
    """See `read_page`: the records as JSON that is passed on, not parsed.

    Each is made by `kind` of its position, its id's bits and the JSON.
    """
    connection = connections[using]
    if connection.vendor == "postgresql":

        def build(epoch: str, row: Row) -> S:
            id, position, rest = row
            bits = id.int
            return kind(position, bits, stored_record(bits, rest))

    else:
        zone = connection.timezone

        def build(epoch: str, row: Row) -> S:
            id, position, type, key, data, headers, at = row
            bits = int(id, 16)
            rest = stored_rest(position, type, key, data, headers, in_utc(at, zone))
            return kind(position, bits, stored_record(bits, rest))

    snapshot = _read(using, name, cursor, build, _STORED_COLUMNS, **options)
    if snapshot.undecodable is not None and not snapshot.records:
        raise snapshot.undecodable
    return snapshot


def _read(
    using: str,
    name: str,
    cursor: int | None,
    build: Callable[[str, Row], R],
    columns: Mapping[str, Sequence[str]],
    *,
    limit: int,
    window: int,
    types: Collection[str] | None = None,
    key: str | None = None,
    with_pending: bool = False,
) -> Snapshot[R]:
    connection = connections[using]
    if cursor is not None:
        cursor = min(cursor, BEYOND)
    if key and types is None:
        window = _EVERYTHING  # the index has just these records
    filtered = types is not None or key is not None
    sql, parameters = _statement(
        connection.vendor,
        name,
        cursor,
        columns[connection.vendor],
        limit=limit,
        types=types,
        key=key,
        window=window,
        pending=_PENDING[connection.vendor] if with_pending else "NULL",
    )
    with connection.cursor() as db:
        db.execute(sql, parameters)
        rows = db.fetchall()
    head = next((row for row in rows if row[0] is not None), None)
    if head is None:
        raise UnknownStream(name)
    epoch, first, write_cursor, before, pending, end_position, end_id = head[:7]
    place = Place(
        stream=name,
        epoch=epoch,
        first_position=first,
        write_cursor=write_cursor,
        tail_before=_tail(before),
    )
    found = sorted((row[7:] for row in rows if row[7] is not None), key=_position)
    undecodable = None
    try:
        records = [build(epoch, row) for row in found]
    except (ValueError, RecursionError):
        records, undecodable = _before_undecodable(name, partial(build, epoch), found)
    start = first if cursor is None else cursor
    if undecodable is not None and not records:
        end, tail = undecodable.position, ""
    elif undecodable is not None or (len(records) == limit and limit) or (records and not filtered):
        end, tail = records[-1].cursor, records[-1].tail
    elif filtered and end_position is not None and end_position > start:
        end, tail = end_position, _tail(end_id)
    else:
        end, tail = start, _tail(before)
    return Snapshot(
        place=place,
        records=records,
        end_cursor=end,
        end_tail=tail,
        pending=bool(pending),
        undecodable=undecodable,
    )


def _before_undecodable(
    name: str, build: Callable[[Row], R], rows: Sequence[Row]
) -> tuple[list[R], UndecodableRecord | None]:
    """Build the records before the first that can't be decoded, and the error for that one."""
    records: list[R] = []
    for row in rows:
        try:
            records.append(build(row))
        except (ValueError, RecursionError) as error:
            why = type(error).__name__
            return records, UndecodableRecord(stream=name, position=row[1], why=why)
    return records, None


def _statement(
    vendor: str,
    name: str,
    cursor: int | None,
    columns: Sequence[str],
    *,
    limit: int,
    types: Collection[str] | None,
    key: str | None,
    window: int,
    pending: str,
) -> tuple[str, list[Any]]:
    start = f"{_GREATEST[vendor]}(coalesce({_BIGINT[vendor]}, s.first_position), s.first_position)"
    where, values = f"r.position >= {start}", [cursor]
    end_position, end_id, end_values = "NULL", "NULL", []
    if types is not None or key is not None:
        end_position = f"{_LEAST[vendor]}({start} + %s, {_WRITE_CURSOR[vendor]})"
        end_id = (
            "(SELECT e.id FROM echomq_record e"
            f" WHERE e.stream_id = s.id AND e.position = {end_position} - 1)"
        )
        end_values = [cursor, window, cursor, window]
        where += f" AND r.position < {start} + %s"
        values += [cursor, window]
    matches, matched = _matches(types, key)
    head = f"""
        s.epoch, s.first_position, {_WRITE_CURSOR[vendor]} AS write_cursor,
        (SELECT b.id FROM echomq_record b
         WHERE b.stream_id = s.id AND b.position = {start} - 1) AS before,
        {pending} AS pending, {end_position} AS end_position, {end_id} AS end_id"""
    sql = _PAGE[vendor].format(
        head=head,
        nothing=", ".join(["NULL"] * len(columns)),
        where=where + matches,
        columns=", ".join(columns),
    )
    first, page = [cursor, *end_values], [*values, *matched]
    if vendor == "postgresql":
        return sql, [*first, name, *page, limit]
    return sql, [*first, *page, name, max(limit, 1)]


def _matches(types: Collection[str] | None, key: str | None) -> tuple[str, list[Any]]:
    sql, values = "", []
    if types is not None:
        sql += f" AND r.type IN ({', '.join(['%s'] * len(types)) or 'NULL'})"
        values += list(types)
    if key is not None:
        # The second condition lets the planner see that the partial index holds all of them. In
        # the index's own words: SQLite doesn't see that `<> ''` means the same.
        sql += " AND r.key = %s" + (" AND NOT (r.key = '')" if key else "")
        values.append(key)
    return sql, values


def read_info(using: str, name: str) -> StreamInfo:
    """Read a stream's row, its head and the times of its ends, from one snapshot."""
    connection = connections[using]
    vendor = connection.vendor
    with connection.cursor() as db:
        db.execute(
            f"""
            SELECT s.epoch, s.first_position, {_WRITE_CURSOR[vendor]}, s.created_at,
                   s.max_records, s.max_age, {time_column(vendor, "o.recorded_at")},
                   {time_column(vendor, "n.recorded_at")}, n.id
            FROM echomq_stream s
            LEFT JOIN echomq_record o ON o.stream_id = s.id AND o.position = s.first_position
            LEFT JOIN echomq_record n ON n.stream_id = s.id
                 AND n.position = {_WRITE_CURSOR[vendor]} - 1
            WHERE s.name = %s""",
            (name,),
        )
        row = db.fetchone()
    if row is None:
        raise UnknownStream(name)
    epoch, first, write_cursor, created_at, max_records, max_age, oldest, newest, last_id = row
    zone = connection.timezone
    newest_at = None if newest is None else aware(newest, zone)
    ahead = max(dt.timedelta(0), newest_at - now()) if newest_at else dt.timedelta(0)
    if isinstance(max_age, int):  # SQLite holds microseconds
        max_age = dt.timedelta(microseconds=max_age)
    return StreamInfo(
        name=name,
        epoch=epoch,
        first_position=first,
        write_cursor=write_cursor,
        token=token_of(epoch, write_cursor, _tail(last_id)),
        created_at=aware(created_at, zone),
        oldest_at=None if oldest is None else aware(oldest, zone),
        newest_at=newest_at,
        clock_ahead=ahead,
        max_records=max_records,
        max_age=max_age,
    )


def recorded_at(using: str, name: str, position: int) -> dt.datetime | None:
    """Return the time of one record, `None` when it isn't there (any more)."""
    connection = connections[using]
    with connection.cursor() as db:
        db.execute(
            f"SELECT {time_column(connection.vendor, 'r.recorded_at')}"
            " FROM echomq_record r JOIN echomq_stream s ON s.id = r.stream_id"
            " WHERE s.name = %s AND r.position = %s AND r.position >= s.first_position",
            (name, position),
        )
        row = db.fetchone()
    return None if row is None else aware(row[0], connection.timezone)


def _record(name: str, epoch: str, zone: dt.tzinfo | None, row: Row) -> StreamRecord:
    id, position, type, key, data, headers, at = row
    return StreamRecord(
        id=EventId.from_uuid(id if isinstance(id, uuid.UUID) else uuid.UUID(id)),
        stream=name,
        epoch=epoch,
        position=position,
        type=type,
        key=key,
        data=decode(data),
        headers={} if headers == "{}" else decode(headers),
        recorded_at=aware(at, zone),
    )


_position = itemgetter(1)


def _tail(id: Any) -> str:
    if id is None:
        return ""
    return EventId.from_uuid(id if isinstance(id, uuid.UUID) else uuid.UUID(id)).tail
