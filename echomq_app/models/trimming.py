"""Retention: the oldest position moves first, the records below it go after.

A reader below the new oldest position is told so from the first commit on, however long
the deletes take, and a trim that was killed is finished by the next one.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
from typing import Any

from django.db import transaction
from django.db.models import F

from ..conf import current
from ..core.names import RESERVED_PREFIX
from ..exceptions import UnknownStream
from . import paging
from .stream import Record, Stream

_CHUNK = 5_000
_QUEUE_STREAM_AGE = dt.timedelta(days=7)


def cursor_at(using: str, name: str, at: dt.datetime) -> int:
    """Find the first position recorded at or after `at`, by halving the range.

    Times are monotone in position, so this needs some twenty look-ups in a million. A
    position that is trimmed meanwhile counts as older.
    """
    info = paging.read_info(using, name)
    low, high = info.first_position, info.write_cursor
    while low < high:
        middle = (low + high) // 2
        found = paging.recorded_at(using, name, middle)
        if found is None or found < at:
            low = middle + 1
        else:
            high = middle
    return low


def move_first_position(using: str, name: str, target: int) -> None:
    """Declare everything below `target` expired. Never moves back."""
    Stream.objects.using(using).filter(name=name, first_position__lt=target).update(
        first_position=target
    )


def delete_below(using: str, name: str) -> int:
    """Delete what lies below the oldest retained position, in chunks; return how many."""
    row = Stream.objects.using(using).filter(name=name).values("id", "first_position").first()
    if row is None:
        return 0
    expired = Record.objects.using(using).filter(
        stream_id=row["id"], position__lt=row["first_position"]
    )
    deleted = 0
    while True:
        lowest = expired.order_by("position").values_list("position", flat=True).first()
        if lowest is None:
            return deleted
        # _raw_delete: no signals, no collection, no look at objects that can't exist.
        deleted += expired.filter(position__lt=lowest + _CHUNK)._raw_delete(using)


def delete_stream(using: str, name: str) -> None:
    """Expire everything, delete it in chunks, then the row; raise `UnknownStream`."""
    info = paging.read_info(using, name)
    move_first_position(using, name, info.write_cursor)
    delete_below(using, name)
    with transaction.atomic(using=using):
        # From here on appenders wait; after the commit they make a new stream of the name.
        rows = Stream.objects.using(using).filter(name=name)
        if not rows.update(first_position=F("first_position")):
            raise UnknownStream(name)
        move_first_position(using, name, paging.read_info(using, name).write_cursor)
        delete_below(using, name)
        rows._raw_delete(using)


def policy(row: Stream) -> tuple[int | None, dt.timedelta | None]:
    """Return (max_records, max_age) in force: the row's own, else the settings', else ours."""
    if row.max_records is not None or row.max_age is not None:
        return row.max_records, row.max_age
    for pattern, rule in current().RETENTION.items():
        if fnmatch.fnmatchcase(row.name, pattern):
            return rule.get("max_records"), _duration(rule.get("max_age"))
    if row.name.startswith(RESERVED_PREFIX):
        return None, _QUEUE_STREAM_AGE
    return None, None


def _duration(value: Any) -> dt.timedelta | None:
    if value is None or isinstance(value, dt.timedelta):
        return value
    return dt.timedelta(seconds=value)


def with_policy(using: str) -> list[tuple[str, int | None, dt.timedelta | None]]:
    """List the streams that a retention policy applies to: (name, max_records, max_age)."""
    listed = []
    for row in Stream.objects.using(using).order_by("name").iterator():
        max_records, max_age = policy(row)
        if max_records is not None or max_age is not None:
            listed.append((row.name, max_records, max_age))
    return listed
