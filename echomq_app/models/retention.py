"""Retention: trim each stream to the policy in force, at a cost that is bounded.

Only streams that have a policy, or what a killed trim has left, are looked at: a walk by name,
so many at a time, that goes on where it ended. Of the streams with much to delete each gets
an equal share of a turn, so that none waits for another.
"""

from __future__ import annotations

import datetime as dt
import fnmatch
import re
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import msgspec
from django.db.models import Case, OuterRef, Q, QuerySet, Subquery, Value, When
from django.db.models.functions import Coalesce

from ..conf import current
from ..core.names import RESERVED_PREFIX
from ..core.records import TrimResult
from ..exceptions import UnknownStream
from . import expired, trimming
from .each import Failure, for_each
from .maintenance import MaintenanceTurn
from .overview import Overview, named, overview, with_ends
from .stream import Record, Stream
from .times import as_django, now
from .transactions import own_transaction

INTERVAL = dt.timedelta(seconds=60)
VISITS = 2_000
"""Streams with a policy that a turn looks at."""
DELETIONS = 50_000
"""Records that a turn deletes, about: its thread has other work."""

_TURN = "retention"
_TOGETHER = 50
_SHARE = 500
_NEAR = 1_000
_QUEUE_STREAM_AGE = dt.timedelta(days=7)


class Policy(NamedTuple):
    """What a stream keeps; `None`: no limit."""

    max_records: int | None
    max_age: dt.timedelta | None


_KEEP_ALL = Policy(None, None)


def policy(row: Stream) -> Policy:
    """Return the policy in force: the row's own, else the settings', else ours."""
    if row.max_records is not None or row.max_age is not None:
        return Policy(row.max_records, row.max_age)
    for pattern, rule in current().RETENTION.items():
        if fnmatch.fnmatchcase(row.name, pattern):
            return Policy(rule.get("max_records"), _duration(rule.get("max_age")))
    if row.name.startswith(RESERVED_PREFIX):
        return Policy(None, _QUEUE_STREAM_AGE)
    return _KEEP_ALL


def apply_retention(using: str, *, dry_run: bool = False) -> list[TrimResult]:
    """Trim every stream to the policy in force; return what that removed, where it did.

    A stream that is deleted meanwhile is no error; one that an open transaction holds is left
    for the next time, because that may be hours. One for which it fails (a timeout, a lock)
    stops no other: its result has an `error`.
    """
    results: list[TrimResult] = []
    after: str | None = ""
    while after is not None:
        rows = _rows(using, after)
        after = rows[-1].name if len(rows) == VISITS else None
        walk = _Walk(using, dry_run=dry_run)
        walk.trim(rows)
        results += walk.results.values()
    return results


def take_turn(using: str) -> bool:
    """Do a worker's share, if no other did it within the minute; return whether more is due."""
    turns = MaintenanceTurn.objects.using(using)
    after = turns.take(_TURN, INTERVAL)
    if after is None:
        return False
    rows = _rows(using, after)
    walk = _Walk(using, deletions=DELETIONS)
    seen = walk.trim(rows)
    at_end = seen == len(rows) < VISITS
    more = walk.more or seen < len(rows)
    turns.end(_TURN, "" if at_end else rows[seen - 1].name, again=more)
    return more


def _rows(using: str, after: str) -> list[Stream]:
    """Return the next streams by name that may have something to trim."""
    streams = Stream.objects.using(using)
    names, prefixes = _by_settings()
    sources = [
        streams.filter(expired_from__isnull=False),
        streams.filter(Q(max_records__isnull=False) | Q(max_age__isnull=False)),
        *([streams.filter(name__in=names)] if names else []),
        *(named(streams.all(), prefix) for prefix in prefixes),
    ]
    if "" in prefixes:
        sources = [streams.all()]
    found = {
        row.name: row
        for source in sources
        for row in source.filter(name__gt=after).order_by("name")[:VISITS]
    }
    return [found[name] for name in sorted(found)[:VISITS]]


def _by_settings() -> tuple[set[str], set[str]]:
    """Return the names of which the settings, or we, have a policy, and how others begin.

    That is the text of a pattern before its first wildcard: what the index of names answers.
    """
    names: set[str] = set()
    prefixes = {RESERVED_PREFIX}
    for pattern in current().RETENTION:
        literal = re.split(r"[*?[]", pattern, maxsplit=1)[0]
        (names if literal == pattern else prefixes).add(literal)
    return names, prefixes


class _Walk:
    """Trims some streams; see the module."""

    def __init__(self, using: str, *, dry_run: bool = False, deletions: int | None = None) -> None:
        self.results: dict[str, TrimResult] = {}
        self.more = False
        self._using = using
        self._dry_run = dry_run
        self._left = deletions

    def trim(self, rows: Sequence[Stream]) -> int:
        """Trim these streams, until so many records are deleted; return how many it got to."""
        for start in range(0, len(rows), _TOGETHER):
            some = rows[start : start + _TOGETHER]
            failures = for_each(
                self._using, some, self._trim, doing="retention", together=len(some)
            )
            self.results |= {each.item.name: self._failed(each) for each in failures}
            if self._left is not None and self._left <= 0:
                return start + len(some)
        return len(rows)

    def _trim(self, rows: Sequence[Stream]) -> None:
        targets = list(_targets(self._using, rows))
        moved = targets if self._dry_run else _move(self._using, targets)
        self.results |= {each.ends.name: each.result(self._dry_run) for each in moved}
        # What moved has something to delete, and what was left before: read again, since a row
        # may have moved before the work failed for others.
        seen = any(row.expired_from is not None or row.name in self.results for row in rows)
        if seen and not self._dry_run:
            left = Stream.objects.using(self._using).filter(
                pk__in=[row.pk for row in rows], expired_from__isnull=False
            )
            self._delete([each for row in left if (each := expired.expired_of(row))])

    def _delete(self, ranges: list[expired.Expired]) -> None:
        if not ranges:
            return
        share = None if self._left is None else max(_SHARE, self._left // len(ranges))
        deleted = expired.delete(self._using, ranges, share)
        if self._left is not None:
            self._left -= deleted
        self.more = self.more or any(each.count for each in ranges)

    def _failed(self, failure: Failure[Stream]) -> TrimResult:
        row, error = failure
        done = self.results.get(row.name) or TrimResult(
            stream=row.name,
            first_position=row.first_position,
            trimmed=0,
            dry_run=self._dry_run,
        )
        return msgspec.structs.replace(done, error=str(error).strip() or type(error).__name__)


class _Target(NamedTuple):
    """A stream that holds too much, and the oldest position that it is to retain."""

    pk: int
    ends: Overview
    position: int

    def result(self, dry_run: bool) -> TrimResult:
        return TrimResult(
            stream=self.ends.name,
            first_position=self.position,
            trimmed=self.position - self.ends.first_position,
            dry_run=dry_run,
        )


def _targets(using: str, rows: Sequence[Stream]) -> Iterable[_Target]:
    """Yield those of the streams that hold more than their policy retains."""
    policies = {row.pk: limits for row in rows if (limits := policy(row)) != _KEEP_ALL}
    if not policies:
        return
    streams = Stream.objects.using(using)
    ends = {row.pk: overview(row) for row in with_ends(streams.filter(pk__in=policies))}
    kept: dict[int, int | None] = {}
    at = now()
    for age in {limits.max_age for limits in policies.values()}:
        old = [
            pk
            for pk, each in ends.items()
            if age is not None
            and policies[pk].max_age == age
            and each.oldest_at is not None
            and each.oldest_at < at - age
        ]
        if age is not None and old:
            kept |= _first_kept(using, old, at - age)
    for pk, each in ends.items():
        max_records, max_age = policies[pk]
        oldest = each.first_position
        if max_records is not None:
            oldest = max(oldest, each.write_cursor - max_records)
        if pk in kept and max_age is not None:
            near = kept[pk]
            if near is None:
                near = _cursor_at(using, each, at - max_age)
            oldest = max(oldest, near)
        oldest = min(oldest, each.write_cursor)
        if oldest > each.first_position:
            yield _Target(pk, each, oldest)


def _first_kept(using: str, pks: list[int], since: dt.datetime) -> dict[int, int | None]:
    """Find the first position of each stream that is young enough, among its first ones."""
    front = Record.objects.filter(
        stream=OuterRef("pk"),
        position__gte=OuterRef("first_position"),
        position__lt=OuterRef("first_position") + _NEAR,
    )
    young = front.filter(recorded_at__gte=as_django(since)).order_by("position")
    rows: QuerySet[Any] = Stream.objects.using(using).filter(pk__in=pks)
    rows = rows.annotate(kept=Subquery(young.values("position")[:1]))
    return dict(rows.values_list("pk", "kept"))


def _cursor_at(using: str, ends: Overview, since: dt.datetime) -> int:
    try:
        return trimming.cursor_at(using, ends.name, since)
    except UnknownStream:  # deleted meanwhile
        return ends.first_position


def _move(using: str, targets: Sequence[_Target]) -> list[_Target]:
    """Move the first positions of those streams that nobody holds; return which they were."""
    if not targets:
        return []
    streams = Stream.objects.using(using)
    mine = (
        Q(pk=each.pk, epoch=each.ends.epoch, first_position__lt=each.position) for each in targets
    )
    with own_transaction(using):
        expired.free_rows(using, streams.filter(reduce(or_, mine))).update(
            expired_from=Coalesce("expired_from", "first_position"),
            first_position=Case(*(When(pk=each.pk, then=Value(each.position)) for each in targets)),
        )
        rows = streams.filter(pk__in=[each.pk for each in targets])
        now_first = {pk: rest for pk, *rest in rows.values_list("pk", "epoch", "first_position")}
    return [each for each in targets if now_first.get(each.pk) == [each.ends.epoch, each.position]]


def _duration(value: Any) -> dt.timedelta | None:
    if value is None or isinstance(value, dt.timedelta):
        return value
    return dt.timedelta(seconds=value)
