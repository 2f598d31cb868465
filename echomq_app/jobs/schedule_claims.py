"""Which entries of `ECHOMQ["SCHEDULE"]` there are, with workers of several versions side by side.

A worker that has an entry in its settings claims it for a while, again and again. An entry that
no worker claims has no ticks any more; it isn't deleted for a month. Nothing else takes one away:
that an entry isn't in the settings of one worker says nothing of the others.

When definitions of an entry differ, the newest counts, and workers with another one leave it
alone: so each tick is that of one definition.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction

from ..models.each import for_each
from ..models.schedule import Schedule
from ..models.times import as_django, aware

if TYPE_CHECKING:
    from .schedule import Entry

logger = logging.getLogger("echomq.jobs")

HOLD = 120.0
"""Seconds for which a worker claims the entries in its settings."""
TOGETHER = 1_000
"""Claims that are renewed in one transaction."""
SUPERSEDED_MAX = 20
"""Earlier definitions of an entry that are remembered: the newest."""


def claim(
    using: str, by_name: Mapping[str, Entry], at: dt.datetime, hold: float
) -> dict[str, dt.datetime]:
    """Renew the claims on the entries; return when those with our definition are due next.

    Costs one statement if there is nothing to change.
    """
    rows = Schedule.objects.using(using)
    found = {row.name: row for row in rows.filter(pk__in=list(by_name))}
    claimed = _times(at, hold)
    late = at + dt.timedelta(seconds=hold / 2)
    due: dict[str, dt.datetime] = {}
    stale = []

    def look(names: Sequence[str]) -> None:
        (name,) = names
        one, row = by_name[name], found.get(name)
        if row is None:
            new = {**one.definition, **claimed, "next_at": column(one, at)}
            row, created = rows.get_or_create(pk=name, defaults=new)
            if created:
                logger.info("event=schedule_added schedule=%s cron=%r", name, one.cron)
        if _definition(row) != one.definition:
            row = _redefine(using, one, row, at, hold)
        elif row.claimed_until is None or aware(row.claimed_until, None) < late:
            stale.append(name)
        if row is not None and row.next_at is not None:
            due[name] = row.next_at

    def renew(names: Sequence[str]) -> None:
        with transaction.atomic(using=using):
            for name in names:
                _free(using, name, by_name[name].definition).update(**claimed)

    for_each(using, sorted(by_name), look, doing="schedule")
    for_each(using, stale, renew, doing="schedule", together=TOGETHER)
    return due


def _redefine(
    using: str, one: Entry, row: Schedule, at: dt.datetime, hold: float
) -> Schedule | None:
    """Give a row our definition, if that is the newer one; return it if it has ours now.

    A definition that the row hasn't had before is newer. One that it has had comes back when
    no living worker has its successor in its settings: the deploy was rolled back. So workers
    of two versions side by side don't undo each other's, however often they start.
    """
    ours, before = list(one.definition.values()), list(_definition(row).values())
    until = row.claimed_until
    was_left = until is None or aware(until, None) < at
    if ours in row.superseded and not was_left:
        return None
    since = at
    if ours in row.superseded:
        # What it would have run since the others are gone, it missed.
        times = [aware(time, None) for time in (row.claimed_at, row.last_at) if time is not None]
        since = max(times, default=at)
    next_at = column(one, since)
    if row.next_at is not None:
        if before[1:] == ours[1:]:  # another task has the same ticks
            next_at = row.next_at
        elif aware(row.next_at, None) <= at:  # a tick that is due under the old one isn't lost
            next_at = row.next_at if next_at is None else min(row.next_at, next_at)
    others = [given for given in row.superseded if given not in (ours, before)]
    new = {
        **one.definition,
        **_times(at, hold),
        "next_at": next_at,
        "superseded": [*others, before][-SUPERSEDED_MAX:],
    }
    here = {**_definition(row), "next_at": row.next_at, "claimed_until": until}
    with transaction.atomic(using=using):
        changed = _free(using, one.name, here).update(**new)
    if not changed:  # another worker is at it
        return None
    logger.info("event=schedule_redefined schedule=%s before=%s now=%s", one.name, before, ours)
    row.next_at = next_at
    return row


def _free(using: str, name: str, here: Mapping[str, Any]) -> Any:
    """Select a row for an update, in a transaction: unless it has changed, or is locked."""
    rows = Schedule.objects.using(using)
    mine = rows.filter(pk=name, **here)
    if connections[using].features.has_select_for_update_skip_locked:
        locked = mine.select_for_update(skip_locked=True, no_key=True)
        return rows.filter(pk__in=locked.values("pk"))
    return mine


def _definition(row: Schedule) -> dict[str, str]:
    return {"task_path": row.task_path, "cron": row.cron, "timezone": row.timezone}


def _times(at: dt.datetime, hold: float) -> dict[str, dt.datetime]:
    until = at + dt.timedelta(seconds=hold)
    return {"claimed_at": as_django(at), "claimed_until": as_django(until)}


def column(one: Entry, at: dt.datetime) -> dt.datetime | None:
    """Return the first tick after a time, as the project has times."""
    found = one.after(at)
    return None if found is None else as_django(found)
