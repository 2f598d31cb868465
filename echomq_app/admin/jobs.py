"""Jobs: what waits, runs and has ended, each with its whole story."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.messages import ERROR
from django.db import connections
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..core.ids import JobId
from ..core.names import QUEUE_NAME_MAX, queue_stream
from ..exceptions import WrongBrand
from ..models import CancelRequest, Job, JobState, Record
from ..models.job import TASK_PATH_MAX
from . import rendering
from .changelist import FilterForm, KeysetAdmin
from .job_actions import JobActions
from .keyset import Keyset, KeysetQuery
from .readonly import home

BY_ID = Keyset(column="id", descending=True, parse=JobId.parse)
_WINDOW = 25_000
_TIMELINE = 200
_BIG = ("arguments", "options", "result", "errors", "cancel_reason")
_STORY = (
    *("id_text", "task_path", "queue", "state_badge", "progress_bar", "cancelled_by", "reason"),
    *("asked_to_cancel", "pretty_arguments", "pretty_result", "pretty_errors"),
)
_TIMES = ("enqueued", "not_before", "started", "attempted", "finished", "lasted")
_EXECUTION = ("attempts", "priority", "in_group", "held_by", "fence", "pretty_options")
# Completed jobs are the many. SQLite uses no partial index for a bound parameter.
_INDEXED = {"postgresql": {state.value for state in JobState} - {JobState.COMPLETED.value}}


class JobFilterForm(FilterForm):
    """Which jobs, and one by its id."""

    state = forms.ChoiceField(
        label=_("State"), required=False, choices=[("", _("All")), *JobState.choices]
    )
    queue = forms.CharField(
        label=_("Queue"),
        required=False,
        max_length=QUEUE_NAME_MAX,
        widget=forms.TextInput(attrs={"size": 14}),
    )
    task = forms.CharField(
        label=_("Task contains"),
        required=False,
        max_length=TASK_PATH_MAX,
        widget=forms.TextInput(attrs={"size": 18}),
    )
    go = forms.CharField(
        label=_("Go to"),
        required=False,
        widget=forms.TextInput(attrs={"placeholder": "JOB…", "size": 30}),
    )


@admin.register(Job)
class JobAdmin(JobActions, KeysetAdmin):
    """Lists jobs newest first, by id."""

    filter_form = JobFilterForm
    list_display = (
        *("id_text", "task_name", "queue", "state_badge", "progress_bar", "tries"),
        *("enqueued_about", "lasted", "cancelled_by", "in_group"),
    )
    change_form_template = "admin/echomq/job/change_form.html"
    fieldsets = (
        (None, {"fields": _STORY}),
        (_("Times"), {"fields": _TIMES}),
        (_("Execution"), {"fields": _EXECUTION}),
    )
    readonly_fields = (*_STORY, *_TIMES, *_EXECUTION)

    def keyset_query(self, request: HttpRequest, form: Any) -> KeysetQuery:
        rows = self.get_queryset(request).defer(*_BIG)
        if not form.is_valid():
            return KeysetQuery(rows=rows.none(), keyset=BY_ID)
        state, queue, task = (form.cleaned_data[name] for name in ("state", "queue", "task"))
        condition = Q()
        if state in _INDEXED.get(connections[rows.db].vendor, ()):
            rows = rows.filter(state=state)
        elif state:
            condition &= Q(state=state)
        if queue:
            condition &= Q(queue=queue)
        if task:
            condition &= Q(task_path__icontains=task)
        return KeysetQuery(rows=rows, keyset=BY_ID, condition=condition, window=_WINDOW)

    def go_to(self, request: HttpRequest, form: Any) -> str | None:
        text = request.GET["go"].strip()
        try:
            id = JobId.parse(text)
        except WrongBrand as error:
            self.message_user(request, str(error), ERROR)
            return None
        if not self.get_queryset(request).filter(pk=id).exists():
            self.message_user(request, _("There is no job %(id)s.") % {"id": id}, ERROR)
            return None
        return self.url("job", "change", id)

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        job: Job = context["original"]
        context["timeline"] = self._timeline(job)
        context["stream_name"] = queue_stream(job.queue)
        if self.has_operate_permission(request):
            context["operations"] = self.operations(request, job)
        return super().render_change_form(request, context, *args, **kwargs)

    def _timeline(self, job: Job) -> list[dict[str, Any]]:
        """Read what the queue's stream says about the job: the newest steps, in order."""
        return [
            {
                "at": rendering.moment(record.recorded_at),
                "type": record.type,
                "url": self.url("record", "change", record.pk),
                "details": _details(record.data),
            }
            for record in reversed(_steps(job)[:_TIMELINE])
        ]

    @admin.display(description=_("id"))
    def id_text(self, job: Job) -> SafeString:
        return rendering.code(job.pk)

    @admin.display(description=_("task"))
    def task_name(self, job: Job) -> str:
        return ".".join(job.task_path.rsplit(".", 2)[-2:])

    @admin.display(description=_("state"))
    def state_badge(self, job: Job) -> SafeString:
        return rendering.badge(job.state, JobState(job.state).label)

    @admin.display(description=_("attempt"))
    def attempts(self, job: Job) -> str:
        return _("%(attempt)d of %(most)d") % {"attempt": job.attempt, "most": job.max_attempts}

    @admin.display(description=_("attempt"))
    def tries(self, job: Job) -> str:
        return f"{job.attempt}/{job.max_attempts}"

    @admin.display(description=_("enqueued at"))
    def enqueued_about(self, job: Job) -> SafeString | str:
        return rendering.moment(job.enqueued_at, "seconds")

    @admin.display(description=_("enqueued at"))
    def enqueued(self, job: Job) -> SafeString | str:
        return rendering.moment(job.enqueued_at)

    @admin.display(description=_("not before"))
    def not_before(self, job: Job) -> SafeString | str:
        return rendering.moment(job.run_after)

    @admin.display(description=_("started at"))
    def started(self, job: Job) -> SafeString | str:
        return rendering.moment(job.started_at)

    @admin.display(description=_("last attempt at"))
    def attempted(self, job: Job) -> SafeString | str:
        return rendering.moment(job.attempted_at)

    @admin.display(description=_("finished at"))
    def finished(self, job: Job) -> SafeString | str:
        return rendering.moment(job.finished_at)

    @admin.display(description=_("duration"))
    def lasted(self, job: Job) -> str:
        """Show how long the last attempt took, or has taken so far."""
        if job.attempted_at is None or not (job.finished_at or job.state == JobState.RUNNING):
            return rendering.EMPTY
        return rendering.duration((job.finished_at or timezone.now()) - job.attempted_at)

    @admin.display(description=_("progress"))
    def progress_bar(self, job: Job) -> SafeString | str:
        return rendering.progress(job.progress, job.progress_note)

    @admin.display(description=_("cancelled by"))
    def cancelled_by(self, job: Job) -> str:
        return job.cancel_kind or rendering.EMPTY

    @admin.display(description=_("group"))
    def in_group(self, job: Job) -> SafeString | str:
        """Show the group that limits the job, and whether it waits for room there."""
        if not job.group_key:
            return rendering.EMPTY
        key = job.group_key.partition(":")[2]
        return rendering.lines(key, _("parked: the group is full") if job.parked else "")

    @admin.display(description=_("reason"))
    def reason(self, job: Job) -> SafeString | str:
        return rendering.block(job.cancel_reason) if job.cancel_reason else rendering.EMPTY

    @admin.display(description=_("asked to cancel"))
    def asked_to_cancel(self, job: Job) -> SafeString | str:
        request = CancelRequest.objects.using(home(Job)).filter(job=job.pk).first()
        if request is None:
            return rendering.EMPTY
        return rendering.lines(rendering.moment(request.requested_at), request.kind, request.reason)

    @admin.display(description=_("arguments"))
    def pretty_arguments(self, job: Job) -> SafeString:
        return rendering.pretty_json(job.arguments)

    @admin.display(description=_("result"))
    def pretty_result(self, job: Job) -> SafeString | str:
        if job.state != JobState.COMPLETED:
            return rendering.EMPTY
        return rendering.pretty_json(job.result)

    @admin.display(description=_("errors"))
    def pretty_errors(self, job: Job) -> SafeString | str:
        return rendering.errors(job.errors)

    @admin.display(description=_("options"))
    def pretty_options(self, job: Job) -> SafeString:
        return rendering.pretty_json(job.options)

    @admin.display(description=_("worker"))
    def held_by(self, job: Job) -> SafeString | str:
        if job.worker_id is None:
            return job.worker_name or rendering.EMPTY
        return rendering.link(self.url("worker", "change", job.worker_id), job.worker_name)


def _steps(job: Job) -> QuerySet[Record]:
    """Return the job's records, newest first: one range of the index of keys."""
    return (
        Record.objects.using(home(Record))
        .filter(~Q(key=""), stream__name=queue_stream(job.queue), key=str(job.pk))
        .order_by("-position")
    )


def _details(data: Any) -> str:
    """Say in a line what a step's record adds to its name."""
    if not isinstance(data, dict):
        return ""
    parts = [
        f"{name}: {data[name]}"
        for name in ("attempt", "worker", "kind", "reason", "run_after")
        if data.get(name) not in (None, "")
    ]
    if isinstance(data.get("error"), dict):
        parts.append(f"{data['error'].get('class')}: {data['error'].get('message')}")
    return rendering.shortened(", ".join(parts), 400)
