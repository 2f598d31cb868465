"""Delete jobs that have ended long enough ago: in small batches, and in nobody's way.

Each batch is a transaction of its own that passes over rows which somebody holds. Claims
read other rows, so they never wait for it (on SQLite, with its one writer, for one batch).
The records in the queue's stream stay as long as the stream's own policy says.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from uuid import UUID

from django.db import connections, transaction

from ..models.each import for_each, raise_if_over
from ..models.job import Job, JobQuerySet
from ..models.times import now_as_django
from ..models.unique import UniqueWindow

BATCH = 500
ROUND = 20
"""Batches that one call deletes at most: the caller has other work too."""
_CLOCKS = 3600.0
"""Seconds by which the clocks of those who enqueue and who finish may differ."""


def prune_windows(using: str, at: dt.datetime | None = None) -> None:
    """Delete unique windows that are over at `at`, or now."""
    UniqueWindow.objects.using(using).prune(at or now_as_django(), BATCH)


def prune_expired(using: str, at: dt.datetime | None = None) -> tuple[int, bool]:
    """Delete finished jobs whose own `retention` is over at `at`, or now.

    Returns how many jobs went, and whether there may be more. A job that can't be deleted (a row
    of the project's refers to it) is logged, and keeps no other.
    """
    moment = at or now_as_django()
    ended = Job.objects.using(using).filter(retention__isnull=False, finished_at__isnull=False)
    deleted, batches, last, more = 0, 0, -1.0, False

    def prune_jobs(retentions: Sequence[float]) -> None:
        nonlocal deleted, batches, more
        (kept,) = retentions
        over = ended.filter(retention=kept, finished_at__lt=moment - dt.timedelta(seconds=kept))
        batch = _Batches(using, over.order_by("finished_at"))
        while batch.more:
            if batches == ROUND:
                more = True
                return
            batches += 1
            deleted += batch.delete()

    while True:
        # One step of the index for each of the few retentions there are.
        following = ended.filter(retention__gt=last).order_by("retention")
        retention = following.values_list("retention", flat=True).first()
        if retention is None:
            return deleted, False
        last = retention
        for_each(using, [retention], prune_jobs, doing="prune")
        if more:
            return deleted, True


def prune_finished(using: str, before: dt.datetime) -> tuple[int, int]:
    """Delete all jobs that ended before a time, whatever their retention.

    Returns how many went, and how many the database refused to delete; those are in the log.
    `before`: as `timezone.now()` gives times.
    """
    # By id, which begins with the time of the enqueue: nothing newer can have ended before.
    jobs = Job.objects.using(using).order_by("pk")
    deleted, failed, after = 0, 0, None
    while True:
        page = jobs if after is None else jobs.filter(pk__gt=after)
        ids = list(page.values_list("pk", flat=True)[: 10 * BATCH])
        if not ids:
            return deleted, failed
        after = ids[-1]
        batch = _Batches(using, jobs.finished().filter(pk__in=ids, finished_at__lt=before))
        while batch.more:
            deleted += batch.delete()
        failed += len(batch.failed)
        if (ids[0].int >> 80) / 1000 > before.timestamp() + _CLOCKS:
            return deleted, failed


class _Batches:
    """Deletes some jobs that have ended and that nobody holds, a batch at a time."""

    def __init__(self, using: str, over: JobQuerySet) -> None:
        self._using = using
        self._over = over
        self.failed: list[UUID] = []
        self.more = True

    def delete(self) -> int:
        """Delete a batch, or where that fails, each of it alone; return how many went."""
        ids: list[UUID] = []
        gone = 0
        try:
            with transaction.atomic(using=self._using):
                ids = self._free(self._over.exclude(pk__in=self.failed))
                gone = self._delete(ids)
        except Exception as error:
            raise_if_over(self._using, error)
            if not ids:
                raise

            def delete_one(one: Sequence[UUID]) -> None:
                nonlocal gone
                with transaction.atomic(using=self._using):
                    done = self._delete(self._free(self._over.filter(pk__in=one)))
                gone += done

            failures = for_each(self._using, ids, delete_one, doing="prune")
            self.failed += [failure.item for failure in failures]
        self.more = gone > 0 and len(ids) == BATCH
        return gone

    def _free(self, over: JobQuerySet) -> list[UUID]:
        if connections[self._using].features.has_select_for_update_skip_locked:
            over = over.skip_locked()
        return list(over.values_list("pk", flat=True)[:BATCH])

    def _delete(self, ids: Sequence[UUID]) -> int:
        # On SQLite the first statement may have read without the lock: look again.
        found = Job.objects.using(self._using).finished().filter(pk__in=ids)
        return found.delete()[0] if ids else 0
