"""Workers: who is there, who was lost, and what each of them runs."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Count, IntegerField, OuterRef, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _t
from django.utils.translation import gettext_lazy as _

from ..models import Job, JobState, Worker
from . import rendering
from .changelist import FilterForm, KeysetAdmin
from .keyset import Keyset, KeysetQuery
from .readonly import home

BY_ID = Keyset(column="id", descending=True, parse=int)
_JOBS_SHOWN = 100


class WorkerFilterForm(FilterForm):
    """All, or only those that hold a lease."""

    alive = forms.BooleanField(label=_("Only those alive"), required=False)


@admin.register(Worker)
class WorkerAdmin(KeysetAdmin):
    """Lists workers, the newest first."""

    filter_form = WorkerFilterForm
    list_display = (
        *("name", "condition", "queue_names", "load", "host", "pid", "started", "heartbeat"),
    )
    fields = (
        *("name", "condition", "queue_names", "concurrency", "running_jobs", "host", "pid"),
        *("started", "heartbeat", "expires", "lost", "stopped"),
    )
    readonly_fields = fields

    def keyset_query(self, request: HttpRequest, form: Any) -> KeysetQuery:
        rows = self.get_queryset(request)
        if form.is_valid() and form.cleaned_data["alive"]:
            rows = rows.filter(lost_at=None, stopped_at=None)
        running = (
            Job.objects.filter(worker=OuterRef("pk"), state=JobState.RUNNING)
            .order_by()
            .values("worker")
            .annotate(number=Count("pk"))
            .values("number")
        )
        number = Coalesce(Subquery(running, output_field=IntegerField()), 0)
        return KeysetQuery(rows=rows.annotate(running=number), keyset=BY_ID)

    @admin.display(description=_("state"))
    def condition(self, worker: Worker) -> SafeString:
        if worker.stopped_at is not None:
            return rendering.badge("stopped", _t("Stopped"))
        if worker.lost_at is not None:
            return rendering.badge("lost", _t("Lost"))
        if worker.expires_at < timezone.now():
            return rendering.badge("expired", _t("Lease expired"))
        return rendering.badge("alive", _t("Alive"))

    @admin.display(description=_("queues"))
    def queue_names(self, worker: Worker) -> str:
        return ", ".join(worker.queues)

    @admin.display(description=_("running"))
    def load(self, worker: Any) -> str:
        return _t("%(running)d of %(most)d") % {
            "running": worker.running,
            "most": worker.concurrency,
        }

    @admin.display(description=_("started at"))
    def started(self, worker: Worker) -> SafeString | str:
        return rendering.moment(worker.started_at)

    @admin.display(description=_("last heartbeat"))
    def heartbeat(self, worker: Worker) -> SafeString | str:
        return rendering.moment(worker.heartbeat_at)

    @admin.display(description=_("lease ends"))
    def expires(self, worker: Worker) -> SafeString | str:
        return rendering.moment(worker.expires_at)

    @admin.display(description=_("lost at"))
    def lost(self, worker: Worker) -> SafeString | str:
        return rendering.moment(worker.lost_at)

    @admin.display(description=_("stopped at"))
    def stopped(self, worker: Worker) -> SafeString | str:
        return rendering.moment(worker.stopped_at)

    @admin.display(description=_("running jobs"))
    def running_jobs(self, worker: Worker) -> SafeString | str:
        jobs = (
            Job.objects.using(home(Job))
            .filter(worker=worker.pk, state=JobState.RUNNING)
            .only("task_path")[:_JOBS_SHOWN]
        )
        found = [(self.url("job", "change", job.pk), job.pk, job.task_path) for job in jobs]
        if not found:
            return rendering.EMPTY
        return format_html_join("", '<div><a href="{}">{}</a> {}</div>', found)
