"""Delete jobs that have ended long enough ago: in small batches, and in nobody's way.

Each batch is a transaction of its own that passes over rows which somebody holds. Claims
read other rows, so they never wait for it (on SQLite, with its one writer, for one batch).
The records in the queue's stream stay as long as the stream's own policy says.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import cast

from django.db import connections, transaction

from ..core.ids import JobId
from ..models.each import for_each
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
    refused: list[JobId] = []
    ended = Job.objects.using(using).filter(retention__isnull=False, finished_at__isnull=False)
    deleted, batches, last = 0, 0, -1.0
    while True:
        # One step of the index for each of the few retentions there are.
        following = ended.filter(retention__gt=last).order_by("retention")
        retention = following.values_list("retention", flat=True).first()
        if retention is None:
            return deleted, False
        last = retention
        over = ended.filter(
            retention=retention, finished_at__lt=moment - dt.timedelta(seconds=retention)
        ).order_by("finished_at")
        while True:
            if batches == ROUND:
                return deleted, True
            batches += 1
            looked_at, gone = _delete(using, over, refused)
            deleted += gone
            if looked_at < BATCH:
                break


def prune_finished(using: str, before: dt.datetime) -> int:
    """Delete all jobs that ended before a time, whatever their retention; return how many.

    `before`: as `timezone.now()` gives times.
    """
    # By id, which begins with the time of the enqueue: nothing newer can have ended before.
    jobs = Job.objects.using(using).order_by("pk")
    deleted, after = 0, None
    refused: list[JobId] = []
    while True:
        page = jobs if after is None else jobs.filter(pk__gt=after)
        ids = list(page.values_list("pk", flat=True)[: 10 * BATCH])
        if not ids:
            return deleted
        after = ids[-1]
        over = jobs.finished().filter(pk__in=ids, finished_at__lt=before)
        looked_at = BATCH
        while looked_at:
            looked_at, gone = _delete(using, over, refused)
            deleted += gone
        if (ids[0].int >> 80) / 1000 > before.timestamp() + _CLOCKS:
            return deleted


def _delete(using: str, over: JobQuerySet, refused: list[JobId]) -> tuple[int, int]:
    """Delete a batch of these jobs that nobody holds; return how many it found, and deleted.

    Those that can't be deleted are added to `refused`, and not tried again.
    """
    deleted = 0

    def delete(some: Sequence[JobId]) -> None:
        nonlocal deleted
        with transaction.atomic(using=using):
            ids = _free(using, Job.objects.using(using).filter(pk__in=some))
            # On SQLite the first statement may have read without the lock: look again.
            gone = Job.objects.using(using).finished().filter(pk__in=ids).delete()[0]
        deleted += gone

    with transaction.atomic(using=using):
        ids = _free(using, over.exclude(pk__in=refused) if refused else over)
    failures = for_each(using, ids, delete, doing="prune", together=BATCH)
    refused += [failure.item for failure in failures]
    return len(ids), deleted


def _free(using: str, jobs: JobQuerySet) -> list[JobId]:
    """Return the first jobs that nobody else holds, locked."""
    if connections[using].features.has_select_for_update_skip_locked:
        jobs = jobs.skip_locked()
    return [cast(JobId, pk) for pk in jobs.values_list("pk", flat=True)[:BATCH]]
