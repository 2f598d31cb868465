"""Retention: the oldest position moves first, the records below it go after.

A reader below the new oldest position is told so from the first commit on, however long
the deletes take, and a trim that was killed is finished by the next one.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fnmatch
from typing import Any

from django.db.models import Exists, F, OuterRef

from ..conf import current
from ..core.names import RESERVED_PREFIX
from ..core.records import StreamInfo, TrimResult
from ..exceptions import InvalidArgument, UnknownStream
from . import paging
from .overview import Overview, overview, with_ends
from .stream import Outbox, Record, Stream
from .times import now
from .transactions import own_transaction, refuse_old_snapshot

_CHUNK = 5_000
_QUEUE_STREAM_AGE = dt.timedelta(days=7)
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
        moved = rows.filter(first_position__lt=target).update(first_position=target)
        return bool(moved) or rows.exists()


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
        with own_transaction(using):
            deleted += expired.filter(position__lt=lowest + _CHUNK)._raw_delete(using)


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


def apply_retention(using: str, *, dry_run: bool = False) -> list[TrimResult]:
    """Trim every stream to the policy in force; return what that removed, where it did.

    One statement finds the streams that hold too much, or what a killed trim has left. A
    stream that is deleted meanwhile is no error; one that an open transaction holds is left
    for the next time, because that may be hours.
    """
    below = Record.objects.filter(stream=OuterRef("pk"), position__lt=OuterRef("first_position"))
    streams = Stream.objects.using(using).order_by("name")
    rows: list[Any] = list(with_ends(streams).annotate(has_expired=Exists(below)))
    results = []
    for row in rows:
        with contextlib.suppress(UnknownStream):
            ends = overview(row)
            max_records, max_age = policy(row)
            oldest = target(using, ends, max_records=max_records, max_age=max_age)
            if not dry_run and (oldest > ends.first_position or row.has_expired):
                if not move_first_position(using, ends.name, oldest, epoch=ends.epoch, wait=False):
                    continue
                delete_below(using, ends.name)
            if oldest > ends.first_position:
                results.append(
                    TrimResult(
                        stream=ends.name,
                        first_position=oldest,
                        trimmed=oldest - ends.first_position,
                        dry_run=dry_run,
                    )
                )
    return results
