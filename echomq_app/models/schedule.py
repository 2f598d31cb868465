"""Recurring jobs: when each is due next. What they are stands in the settings."""

from __future__ import annotations

import datetime as dt

from django.db import models
from django.utils.translation import gettext_lazy as _

from .fields import BrandedIdField, NameField
from .job import TASK_PATH_MAX
from .times import as_django

SCHEDULE_NAME_MAX = 100
CRON_MAX = 200
ZONE_MAX = 64


_KEEP = dt.timedelta(days=30)


class ScheduleQuerySet(models.QuerySet["Schedule"]):
    """Deletes recurring jobs that are no longer in any worker's settings."""

    def prune(self, at: dt.datetime) -> int:
        """Delete those that no worker has had in its settings for 30 days; return how many."""
        return self.filter(claimed_until__lt=as_django(at - _KEEP)).delete()[0]


class Schedule(models.Model):
    """One entry of `ECHOMQ["SCHEDULE"]`, as far as the database has to know it.

    Whoever moves `next_at` on enqueues the job, in the same transaction: so each tick has
    one job, however many workers look.

    A worker that has the entry in its settings, as it stands here, renews `claimed_until`. No
    worker takes away what it doesn't know.
    """

    name = NameField(max_length=SCHEDULE_NAME_MAX, primary_key=True)
    task_path = models.CharField(max_length=TASK_PATH_MAX)
    cron = models.CharField(max_length=CRON_MAX)
    timezone = models.CharField(max_length=ZONE_MAX)
    next_at = models.DateTimeField(null=True, blank=True, help_text=_("The next tick, if any."))
    last_at = models.DateTimeField(
        null=True, blank=True, help_text=_("The last tick that was looked at.")
    )
    last_job_id = BrandedIdField(brand="JOB", null=True, blank=True)
    last_error = models.TextField(blank=True, default="")
    claimed_at = models.DateTimeField(
        null=True, blank=True, help_text=_("When a worker last had it in its settings.")
    )
    claimed_until = models.DateTimeField(
        null=True, blank=True, help_text=_("After this, no worker has it in its settings.")
    )
    superseded = models.JSONField(
        default=list, blank=True, help_text=_("Earlier definitions: [task, cron, time zone].")
    )

    objects = ScheduleQuerySet.as_manager()

    class Meta:
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        ordering = ("name",)

    def __str__(self) -> str:
        return str(self.name)
