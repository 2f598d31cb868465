"""Recurring jobs: `ECHOMQ["SCHEDULE"]`, and one job per tick however many workers run.

    ECHOMQ = {
        "SCHEDULE": {
            "nightly": {"task": "shop.tasks.report", "cron": "30 2 * * *",
                        "timezone": "Europe/Berlin", "missed": "once"},
        }
    }

Every worker looks, by the database's clock. A schedule has a row with its next tick; whoever
moves that on enqueues the job, in the same transaction, and a row that somebody is at is
passed over. An entry lives as long as any worker has it in its settings: each renews its claim,
and none takes away what it doesn't know. Of two definitions of an entry the newer one counts.

What cron means at a change of the clocks is Debian's: a fixed time that the change leaves
out comes right after it, one that comes twice is taken once, and an expression such as
`*/10 * * * *` follows the real time.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError
from django.db import InterfaceError, OperationalError, connections, transaction

from ..conf import current, project_setting
from ..core.ids import JobId
from ..core.payload import storable
from ..exceptions import InvalidArgument, WrongBrand
from ..models.each import for_each
from ..models.schedule import Schedule
from ..models.times import as_django, aware
from .schedule_claims import HOLD, claim, column
from .tasks import load_task
from .tasks_api import Task

logger = logging.getLogger("echomq.jobs")

ON_TIME = 60.0
"""A tick that is looked at later than this was missed."""
AHEAD_MAX = dt.timedelta(minutes=10)
"""Less than this, and the clocks of two database servers may differ."""
MISSED_MAX = 100
"""Missed ticks that get a job at most: the newest."""
STEPS_MAX = 10_000
ERROR_MAX = 2_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One schedule, checked. Raises `InvalidArgument`."""

    name: str
    task: str
    cron: str
    timezone: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    queue: str | None = None
    priority: int | None = None
    missed: str = "once"
    """`skip`: no job for a tick that was missed; `once`: one for all that were; `all`."""

    def __post_init__(self) -> None:
        try:
            zone = ZoneInfo(self.timezone)
        except Exception as error:
            raise InvalidArgument(f"There is no time zone {self.timezone!r}.") from error
        try:
            next(CronSim(self.cron, dt.datetime(2026, 1, 1, tzinfo=zone)))
        except CronSimError as error:
            raise InvalidArgument(
                f"{self.cron!r} is no cron expression ({error}). It has five fields: minute, "
                "hour, day of month, month, day of week."
            ) from error
        except StopIteration:
            raise InvalidArgument(f"{self.cron!r} never comes true.") from None

    @property
    def definition(self) -> dict[str, str]:
        """What the row says of it."""
        return {"task_path": self.task, "cron": self.cron, "timezone": self.timezone}

    def after(self, moment: dt.datetime) -> dt.datetime | None:
        """Return the first tick after a time, in UTC; None if there is none."""
        for tick in CronSim(self.cron, moment.astimezone(ZoneInfo(self.timezone))):
            found = tick.astimezone(dt.UTC)
            # A wall clock that is put back gives a tick again that has been.
            if found > moment:
                return found
        return None

    def due(self, first: dt.datetime, at: dt.datetime) -> list[dt.datetime]:
        """Return the ticks from `first` to `at`, in order: the newest, if they are many."""
        ticks: deque[dt.datetime] = deque(maxlen=MISSED_MAX)
        tick: dt.datetime | None = first
        steps = 0
        while tick is not None and tick <= at:
            ticks.append(tick)
            steps += 1
            if steps == STEPS_MAX:  # down for long: go on near the end
                gap = (tick - first) / steps
                tick = max(tick, at - 2 * MISSED_MAX * gap)
            tick = self.after(tick)
        return list(ticks)

    def to_run(self, ticks: Sequence[dt.datetime], at: dt.datetime) -> list[dt.datetime]:
        """Return those of the due ticks that get a job."""
        if self.missed == "all":
            return list(ticks)
        last = list(ticks[-1:])
        if self.missed == "once":
            return last
        return [tick for tick in last if (at - tick).total_seconds() <= ON_TIME]

    def prepared(self) -> Task:
        """Import the task; raise what is wrong with it, or with its queue or priority."""
        given: dict[str, Any] = {"queue_name": self.queue, "priority": self.priority}
        return load_task(self.task).using(
            **{name: value for name, value in given.items() if value is not None}
        )


def entry(name: str, given: Mapping[str, Any]) -> Entry:
    """Make the entry of one item of the setting. Raises `InvalidArgument`."""
    zone = given.get("timezone") or project_setting("TIME_ZONE") or "UTC"
    return Entry(**{**given, "name": name, "timezone": zone})


def configured() -> list[Entry]:
    """Return what the settings say. A wrong one, of which a check tells, is logged and left out."""
    found = []
    for name, given in current().SCHEDULE.items():
        try:
            found.append(entry(name, given))
        except InvalidArgument as error:
            logger.error("event=schedule_refused schedule=%s error=%s", name, error)
    return found


def sync(using: str, ours: Iterable[Entry], at: dt.datetime, hold: float = HOLD) -> None:
    """Claim the entries of these settings for `hold` seconds; create or update their rows.

    Deletes nothing: what isn't in these settings may be in those of another worker.
    """
    claim(using, {one.name: one for one in ours}, at, hold)


def run_due(using: str, ours: Iterable[Entry], at: dt.datetime, hold: float = HOLD) -> float | None:
    """Enqueue what is due; return the seconds to the next tick, None if there is none.

    Claims the entries, too. Call it again within `hold` seconds.
    """
    waits: list[float] = []
    by_name = {one.name: one for one in ours}
    found = claim(using, by_name, at, hold)

    def look(names: Sequence[str]) -> None:
        (name,) = names
        one, next_at = by_name[name], aware(found[name], None)
        following: dt.datetime | None = next_at
        if next_at <= at:
            following = _run_one(using, one, next_at, at)
        elif _is_ahead(one, next_at, at):
            following = _put_back(using, one, next_at, at)
        if following is not None:
            waits.append(max(0.0, (following - at).total_seconds()))

    for_each(using, list(found), look, doing="schedule")
    return min(waits, default=None)


def _is_ahead(one: Entry, next_at: dt.datetime, at: dt.datetime) -> bool:
    """Tell whether only a clock that was far ahead can have said this."""
    latest = one.after(at + AHEAD_MAX)
    return latest is not None and next_at > latest


def _put_back(using: str, one: Entry, seen: dt.datetime, at: dt.datetime) -> dt.datetime | None:
    """Have a schedule that waits for a time that a wrong clock said go on from now."""
    logger.warning("event=schedule_put_back schedule=%s next_at=%s", one.name, seen.isoformat())
    here = {**one.definition, "next_at": as_django(seen)}
    Schedule.objects.using(using).filter(pk=one.name, **here).update(next_at=column(one, at))
    return one.after(at)


def _run_one(using: str, one: Entry, seen: dt.datetime, at: dt.datetime) -> dt.datetime | None:
    """Handle a due schedule, if nobody else does; return its next tick if we did."""
    ticks = one.due(seen, at)
    next_at = one.after(max(ticks[-1], at))
    rows = Schedule.objects.using(using)
    here = {**one.definition, "next_at": as_django(seen)}
    with transaction.atomic(using=using):
        mine = rows.filter(pk=one.name, **here)
        if connections[using].features.has_select_for_update_skip_locked:
            mine = mine.select_for_update(skip_locked=True, no_key=True)
            if not mine.values_list("pk").first():
                return None
        # On SQLite this is the first statement, and the condition decides who is first.
        moved = rows.filter(pk=one.name, **here).update(
            next_at=None if next_at is None else as_django(next_at), last_at=as_django(ticks[-1])
        )
        if not moved:
            return None
        job, error = _enqueue(using, one, one.to_run(ticks, at))
        told = {"last_error": error} if job is None else {"last_error": error, "last_job_id": job}
        rows.filter(pk=one.name).update(**told)
    return next_at


def _enqueue(using: str, one: Entry, ticks: Sequence[dt.datetime]) -> tuple[JobId | None, str]:
    """Enqueue a job for each tick; return the last one's id, or what went wrong."""
    job: JobId | None = None
    try:
        with transaction.atomic(using=using):
            for _ in ticks:
                job = _id(one.prepared().enqueue(*one.args, **one.kwargs).id)
    except (OperationalError, InterfaceError):
        raise  # a moment later it may go well: nothing has happened
    except Exception as error:
        logger.exception("event=schedule_failed schedule=%s task=%s", one.name, one.task)
        return None, storable(f"{type(error).__name__}: {error}")[:ERROR_MAX]
    logger.info("event=schedule_ran schedule=%s jobs=%d last=%s", one.name, len(ticks), job)
    return job, ""


def _id(text: str) -> JobId | None:
    try:
        return JobId.parse(text)
    except WrongBrand:
        return None  # a task of another backend
