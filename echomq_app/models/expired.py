"""Deleting what has expired, in chunks that cost the same from the first to the last.

Index entries of deleted records stay as long as a snapshot is open that is older (pg_dump's, a
report's). So no statement here begins at the front: each chunk begins where the last one ended,
and the first one at the stream's `expired_from`, which is kept with the first position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import reduce
from operator import or_

from django.db import OperationalError, connections
from django.db.models import Case, Q, QuerySet, Value, When

from .stream import Record, Stream
from .transactions import in_transaction, own_transaction

CHUNK = 5_000
CHUNK_BYTES = 64 << 20
_SMALLER = 8
_QUERY_CANCELED = "57014"

_SIZE = {
    "postgresql": "pg_column_size(data) + pg_column_size(headers)",
    "sqlite": "length(data) + length(headers)",
}
_FRONT = """
    SELECT stream_id, max(position) + 1 FROM (
        SELECT stream_id, position, sum(bytes) OVER up_to AS total, row_number() OVER up_to AS nth
        FROM (SELECT stream_id, position, {size} AS bytes FROM echomq_record
              WHERE {ranges} ORDER BY stream_id, position LIMIT %s) AS front
        WINDOW up_to AS (ORDER BY stream_id, position)
    ) AS sized WHERE total <= %s OR nth = 1 GROUP BY stream_id"""


@dataclasses.dataclass(slots=True, kw_only=True)
class Expired:
    """Expired positions of one stream: below `below`, and what is below `low` is deleted."""

    stream_id: int
    epoch: str
    first: int
    """Where they began, as the stream's row says."""
    low: int
    below: int

    @property
    def count(self) -> int:
        return self.below - self.low


def expired_of(row: Stream) -> Expired | None:
    """Return the positions of a stream that have expired and may not be deleted yet."""
    first = row.expired_from
    if first is None:
        return None
    return Expired(
        stream_id=row.pk, epoch=row.epoch, first=first, low=first, below=row.first_position
    )


def delete(using: str, ranges: Sequence[Expired], at_most: int | None = None) -> int:
    """Delete the records of these ranges, and write down how far it came; return how many.

    `at_most`: of each range, so many positions.
    """
    ends = {
        each.stream_id: each.below if at_most is None else min(each.below, each.low + at_most)
        for each in ranges
    }
    deleted, left = 0, [each for each in ranges if each.low < ends[each.stream_id]]
    while left:
        deleted += _delete_chunk(using, _fitting(left, ends), ends)
        left = [each for each in left if each.low < ends[each.stream_id]]
    _write_down(using, ranges)
    return deleted


def _fitting(ranges: list[Expired], ends: dict[int, int]) -> list[Expired]:
    """Return the first range, and those after it that fit into the same chunk."""
    fitting, size = ranges[:1], ends[ranges[0].stream_id] - ranges[0].low
    for each in ranges[1:]:
        size += ends[each.stream_id] - each.low
        if size > CHUNK:
            break
        fitting.append(each)
    return fitting


def _delete_chunk(using: str, ranges: list[Expired], ends: dict[int, int]) -> int:
    """Delete what is stored of the first records of these ranges, and move their `low`."""
    records, size = CHUNK, CHUNK_BYTES
    while True:
        # By position, not by LIMIT alone: PostgreSQL may sort all of a range to find its first.
        stops = {each.stream_id: min(ends[each.stream_id], each.low + records) for each in ranges}
        try:
            found = _front(using, ranges, stops, records, size)
            deleted = _delete_below(using, ranges, found)
            break
        except OperationalError as error:
            slow = getattr(error.__cause__, "sqlstate", None) == _QUERY_CANCELED
            if not slow or records == 1 or in_transaction(connections[using]):
                raise
            records, size = max(1, records // _SMALLER), size // _SMALLER
    last = max(found, default=None)
    for each in ranges:
        # What an earlier stream than the last one found has more than was found, was found whole.
        whole = last is None or each.stream_id < last
        each.low = stops[each.stream_id] if whole else found.get(each.stream_id, each.low)
    return deleted


def _front(
    using: str, ranges: list[Expired], stops: dict[int, int], records: int, size: int
) -> dict[int, int]:
    """Return for each stream of which something is deleted in this chunk, below which position."""
    connection = connections[using]
    one = "(stream_id = %s AND position >= %s AND position < %s)"
    sql = _FRONT.format(size=_SIZE[connection.vendor], ranges=" OR ".join([one] * len(ranges)))
    values = [
        value for each in ranges for value in (each.stream_id, each.low, stops[each.stream_id])
    ]
    with connection.cursor() as cursor:
        cursor.execute(sql, [*values, records, size])
        return dict(cursor.fetchall())


def _delete_below(using: str, ranges: list[Expired], found: dict[int, int]) -> int:
    expired = [
        Q(stream_id=each.stream_id, position__gte=each.low, position__lt=found[each.stream_id])
        for each in ranges
        if each.stream_id in found
    ]
    if not expired:
        return 0
    # _raw_delete: no signals, no collection, no look at objects that can't exist.
    with own_transaction(using):
        return Record.objects.using(using).filter(reduce(or_, expired))._raw_delete(using)


def _write_down(using: str, ranges: Sequence[Expired]) -> None:
    """Tell the streams' rows how far it came; one that somebody holds is told the next time."""
    mine = reduce(or_, (Q(pk=r.stream_id, epoch=r.epoch, expired_from=r.first) for r in ranges))
    with own_transaction(using):
        free_rows(using, Stream.objects.using(using).filter(mine)).update(
            expired_from=Case(
                *(
                    When(pk=each.stream_id, first_position__gt=each.low, then=Value(each.low))
                    for each in ranges
                ),
                default=None,
            )
        )


def free_rows(using: str, rows: QuerySet[Stream]) -> QuerySet[Stream]:
    """Keep the streams that no other transaction holds, and lock them, for an update right after.

    SQLite has no such locks: the update is the transaction's first statement, and takes the lock.
    """
    if not connections[using].features.has_select_for_update_skip_locked:
        return rows
    free = rows.order_by("name").select_for_update(skip_locked=True, no_key=True)
    return rows.filter(pk__in=list(free.values_list("pk", flat=True)))
