"""Recurring jobs: when each is due next. What they are stands in the settings."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from .fields import BrandedIdField, NameField
from .job import TASK_PATH_MAX

SCHEDULE_NAME_MAX = 100
CRON_MAX = 200
ZONE_MAX = 64


class Schedule(models.Model):
    """One entry of `ECHOMQ["SCHEDULE"]`, as far as the database has to know it.

    Whoever moves `next_at` on enqueues the job, in the same transaction: so each tick has
    one job, however many workers look.
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

    class Meta:
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        ordering = ("name",)

    def __str__(self) -> str:
        return str(self.name)
