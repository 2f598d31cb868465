"""Workers and their leases.

The lease is one row, not one per job: a heartbeat is one UPDATE of the worker's own row,
which no job's lock can stop. Whether a late heartbeat still counts is decided on that
row alone: either the heartbeat renews it, or `lose_expired` has marked it, never both.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db import connections, models
from django.db.models.functions import Now
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

NAME_MAX = 200
_KEEP = dt.timedelta(days=1)


class WorkerQuerySet(models.QuerySet["Worker"]):
    """The life of a lease. Times are the database's, where it has a clock of its own."""

    def register(
        self, *, name: str, host: str, pid: int, queues: list[str], concurrency: int, lease: float
    ) -> Worker:
        """Write a new worker's row, with a lease of `lease` seconds from now."""
        now = self._now()
        row = self.create(
            name=name[:NAME_MAX],
            host=host[:NAME_MAX],
            pid=pid,
            queues=queues,
            concurrency=concurrency,
            started_at=now,
            heartbeat_at=now,
            expires_at=now + dt.timedelta(seconds=lease),
        )
        row.refresh_from_db(using=self.db)
        return row

    def heartbeat(self, worker_id: int, lease: float) -> bool:
        """Renew the lease; False when it was declared lost, and then for good."""
        now = self._now()
        return bool(
            self.filter(pk=worker_id, lost_at=None, stopped_at=None).update(
                heartbeat_at=now, expires_at=now + dt.timedelta(seconds=lease)
            )
        )

    def stop(self, worker_id: int) -> None:
        """End the lease of a worker that has no job any more."""
        self.filter(pk=worker_id, lost_at=None).update(stopped_at=self._now())

    def lose_expired(self) -> int:
        """Declare leases lost that weren't renewed in time; return how many.

        Waits for nobody: a row that is locked is being renewed, or somebody else is at it.
        """
        expired = self.filter(lost_at=None, stopped_at=None, expires_at__lt=self._now())
        if connections[self.db].features.has_select_for_update_skip_locked:
            expired = expired.select_for_update(skip_locked=True)
        # The condition stands outside too: it is looked at again under the lock.
        return self.filter(
            pk__in=expired.values("pk"), lost_at=None, stopped_at=None, expires_at__lt=self._now()
        ).update(lost_at=self._now())

    def prune(self) -> int:
        """Forget workers that ended a day ago; return how many."""
        before = timezone.now() - _KEEP
        old = models.Q(stopped_at__lt=before) | models.Q(lost_at__lt=before)
        return self.filter(old).delete()[0]

    def _now(self) -> Any:
        return Now() if connections[self.db].vendor == "postgresql" else timezone.now()


class Worker(models.Model):
    """One run of `echomq_worker`, and its lease on the jobs that name it."""

    name = models.CharField(max_length=NAME_MAX)
    host = models.CharField(max_length=NAME_MAX)
    pid = models.IntegerField()
    queues = models.JSONField()
    concurrency = models.IntegerField()
    started_at = models.DateTimeField()
    heartbeat_at = models.DateTimeField()
    expires_at = models.DateTimeField(help_text=_("The lease ends here unless it is renewed."))
    lost_at = models.DateTimeField(
        null=True, blank=True, help_text=_("The lease wasn't renewed: its jobs were taken away.")
    )
    stopped_at = models.DateTimeField(null=True, blank=True)

    objects = WorkerQuerySet.as_manager()

    class Meta:
        verbose_name = _("worker")
        verbose_name_plural = _("workers")

    def __str__(self) -> str:
        return self.name
