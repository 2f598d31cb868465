"""Recurring jobs: when each was due last, when it is due next, what came of it."""

from __future__ import annotations

from django.contrib import admin
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..models import Schedule
from ..models.times import now_as_django
from . import rendering
from .changelist import NamedAdmin


@admin.register(Schedule)
class ScheduleAdmin(NamedAdmin):
    """Lists the schedules that workers know of, by name."""

    list_display = (
        *("name", "task_path", "cron", "timezone", "next_tick", "last_tick", "last_job"),
        "claim",
    )
    fields = (*list_display, "error")
    readonly_fields = fields

    @admin.display(description=_("next tick"))
    def next_tick(self, schedule: Schedule) -> SafeString | str:
        return rendering.moment(schedule.next_at)

    @admin.display(description=_("last tick"))
    def last_tick(self, schedule: Schedule) -> SafeString | str:
        return rendering.moment(schedule.last_at)

    @admin.display(description=_("last job"))
    def last_job(self, schedule: Schedule) -> SafeString | str:
        if schedule.last_error:
            return rendering.badge("failed", _("Not enqueued"))
        if schedule.last_job_id is None:
            return rendering.EMPTY
        id = schedule.last_job_id
        return rendering.link(self.url("job", "change", id), str(id))

    @admin.display(description=_("in the settings of a worker"))
    def claim(self, schedule: Schedule) -> SafeString | str:
        until = schedule.claimed_until
        if until is None or until < now_as_django():
            return rendering.badge("failed", _("No"))
        return rendering.badge("completed", _("Yes"))

    @admin.display(description=_("error"))
    def error(self, schedule: Schedule) -> SafeString | str:
        return rendering.block(schedule.last_error) if schedule.last_error else rendering.EMPTY
