"""Trimming: the oldest position moves first, the records below it go after.

A reader below the new oldest position is told so from the first commit on, however long
the deletes take, and a trim that was killed is finished by the next one, or by retention.
"""

from __future__ import annotations

import datetime as dt

from django.db.models import F
from django.db.models.functions import Coalesce

from ..core.records import StreamInfo
from ..exceptions import InvalidArgument, UnknownStream
from . import expired, paging
from .overview import Overview
from .stream import Outbox, Stream
from .times import now
from .transactions import own_transaction, refuse_old_snapshot

_LONGEST = dt.timedelta(days=36_500)


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


def target(
    using: str,
    ends: Overview | StreamInfo,
    *,
    max_records: int | None = None,
    max_age: dt.timedelta | None = None,
    before: int | dt.datetime | None = None,
) -> int:
    """Return the oldest position that all of the given limits retain, at most the head.

    Raises `InvalidArgument` for a limit that is none.
    """
    oldest = ends.first_position
    if max_records is not None:
        check_count(max_records)
        oldest = max(oldest, ends.write_cursor - max_records)
    if max_age is not None:
        check_age(max_age)
        since = now() - max_age
        if ends.oldest_at is not None and ends.oldest_at < since:
            oldest = max(oldest, cursor_at(using, ends.name, since))
    if isinstance(before, dt.datetime):
        check_aware(before)
        oldest = max(oldest, cursor_at(using, ends.name, before))
    elif before is not None:
        if not is_count(before):
            raise InvalidArgument(f"before is a position or an aware datetime, not {before!r}.")
        oldest = max(oldest, before)
    return min(oldest, ends.write_cursor)


def is_count(value: object) -> bool:
    """Tell whether a value is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_count(value: object) -> None:
    """Raise `InvalidArgument` for what is no number of records, or none that a column holds."""
    if not is_count(value) or not isinstance(value, int) or value > paging.BEYOND:
        raise InvalidArgument(f"max_records is a count from 0, not {value!r}.")


def check_age(value: object) -> None:
    """Raise `InvalidArgument` for what is no length of time, or none that a column holds."""
    if not isinstance(value, dt.timedelta) or not dt.timedelta(0) <= value <= _LONGEST:
        raise InvalidArgument(
            f"max_age is a timedelta from 0 to {_LONGEST.days:,} days, not {value!r}."
        )


def check_aware(value: object) -> None:
    """Raise `InvalidArgument` for what is no time with a zone."""
    if not isinstance(value, dt.datetime) or value.tzinfo is None:
        raise InvalidArgument(f"A time here is an aware datetime (with tzinfo), not {value!r}.")


def move_first_position(
    using: str, name: str, target: int, *, epoch: str, wait: bool = True
) -> bool:
    """Declare everything below `target` expired. Never moves back.

    `False`, and nothing done, if this isn't the stream's epoch any more: positions of a
    stream that was deleted and made anew are other ones. An open transaction that appended to
    the stream is waited for, or else (`wait=False`) nothing is done either.
    """
    with own_transaction(using):
        rows = Stream.objects.using(using).filter(name=name, epoch=epoch)
        if not wait and not rows.select_for_update(skip_locked=True, no_key=True):
            return False
        moved = rows.filter(first_position__lt=target).update(
            first_position=target, expired_from=Coalesce("expired_from", "first_position")
        )
        return bool(moved) or rows.exists()


def delete_below(using: str, name: str) -> int:
    """Delete what lies below the oldest retained position, in chunks; return how many."""
    row = Stream.objects.using(using).filter(name=name).first()
    left = None if row is None else expired.expired_of(row)
    return 0 if left is None else expired.delete(using, [left])


def delete_stream(using: str, name: str) -> None:
    """Expire everything, delete it in chunks, then the row; raise `UnknownStream`."""
    refuse_old_snapshot(using, f"delete of {name!r}")
    info = paging.read_info(using, name)
    move_first_position(using, name, info.write_cursor, epoch=info.epoch)
    delete_below(using, name)
    with own_transaction(using):
        # From here on appenders wait; after the commit they make a new stream of the name.
        rows = Stream.objects.using(using).filter(name=name)
        found = rows.update(first_position=F("first_position"))
        if found:
            info = paging.read_info(using, name)
            move_first_position(using, name, info.write_cursor, epoch=info.epoch)
            delete_below(using, name)
            Outbox.objects.using(using).filter(stream=name)._raw_delete(using)
            rows._raw_delete(using)
    if not found:
        raise UnknownStream(name)
