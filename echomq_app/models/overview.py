"""Many streams at a glance: one statement for a list, however many streams it holds."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec
from django.db.models import OuterRef, QuerySet, Subquery

from ..core.names import STREAM_NAME_MAX
from .stream import Record, Stream
from .times import aware


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream held when the list was read."""

    name: str
    epoch: str
    first_position: int
    write_cursor: int
    oldest_at: dt.datetime | None
    newest_at: dt.datetime | None

    @property
    def count(self) -> int:
        """How many records are retained: positions are dense, so nobody has to count."""
        return self.write_cursor - self.first_position


def with_ends(rows: QuerySet[Stream]) -> QuerySet[Stream]:
    """Add what `overview` needs: three look-ups in an index for each row."""
    records = Record.objects.filter(stream=OuterRef("pk"))
    # At or above first_position only; models/paging.py says why.
    newest = records.filter(position__gte=OuterRef("first_position")).order_by("-position")
    oldest = records.filter(position=OuterRef("first_position"))
    return rows.annotate(
        last_position=Subquery(newest.values("position")[:1]),
        newest_at=Subquery(newest.values("recorded_at")[:1]),
        oldest_at=Subquery(oldest.values("recorded_at")[:1]),
    )


def overview(row: Any) -> Overview:
    """Return what a row of `with_ends` says."""
    last: int | None = row.last_position
    return Overview(
        name=row.name,
        epoch=row.epoch,
        first_position=row.first_position,
        write_cursor=row.first_position if last is None else last + 1,
        oldest_at=None if row.oldest_at is None else aware(row.oldest_at, None),
        newest_at=None if row.newest_at is None else aware(row.newest_at, None),
    )


def named(rows: QuerySet[Stream], prefix: str) -> QuerySet[Stream]:
    """Keep the streams whose names begin so.

    A range and not LIKE: by bytes, as names are compared everywhere, and from the index.
    """
    if not prefix:
        return rows
    return rows.filter(name__gte=prefix, name__lt=prefix.ljust(STREAM_NAME_MAX + 1, "~"))
