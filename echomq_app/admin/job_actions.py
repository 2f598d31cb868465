"""Cancel and retry: asked for, confirmed, done by the services that code calls, audited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from django import forms
from django.contrib import admin
from django.contrib.messages import ERROR, SUCCESS, WARNING
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..core.ids import JobId
from ..exceptions import EchoMQError, WrongBrand
from ..jobs import control
from ..models import Job, JobState
from ..models.job import FINISHED

if TYPE_CHECKING:
    from .changelist import KeysetAdmin

    _Base = KeysetAdmin
else:
    _Base = object

MOST = 200
"""How many jobs one request may act on."""


class ReasonForm(forms.Form):
    """Why: it is handed to the handler, and stays with the job."""

    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        required=False,
        max_length=2_000,
        widget=forms.Textarea(attrs={"rows": 3, "autofocus": True}),
        help_text=gettext_lazy("The handler is given it, and it stays with the job."),
    )


class NoForm(forms.Form):
    """Nothing to fill in."""


class JobActions(_Base):
    """For who may change jobs: actions on the list, links on a job's page, one page for both."""

    actions = ("cancel_selected", "retry_selected")

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Tell whether the user may cancel and retry: Django's "can change job"."""
        return bool(request.user.has_perm("echomq.change_job"))

    @admin.action(permissions=["operate"], description=gettext_lazy("Cancel selected jobs…"))
    def cancel_selected(
        self, request: HttpRequest, queryset: QuerySet[Job]
    ) -> HttpResponseBase | None:
        return self._to_confirmation(request, queryset, "cancel")

    @admin.action(permissions=["operate"], description=gettext_lazy("Retry selected jobs…"))
    def retry_selected(
        self, request: HttpRequest, queryset: QuerySet[Job]
    ) -> HttpResponseBase | None:
        return self._to_confirmation(request, queryset, "retry")

    def get_urls(self) -> list[URLPattern]:
        own = [
            path(
                f"{verb}/",
                self.admin_site.admin_view(self.operate_view),
                {"verb": verb},
                name=f"echomq_job_{verb}",
            )
            for verb in ("cancel", "retry")
        ]
        return [*own, *super().get_urls()]

    def operations(self, request: HttpRequest, job: Job) -> list[tuple[str, str]]:
        """Return what can be done with a job now: (address, name)."""
        found = []
        if job.state not in FINISHED:
            found.append((self._address(request, "cancel", [job.pk]), _("Cancel…")))
        if job.state in (JobState.FAILED, JobState.CANCELLED):
            found.append((self._address(request, "retry", [job.pk]), _("Retry…")))
        return found

    def operate_view(self, request: HttpRequest, verb: str) -> HttpResponse:
        """Ask for confirmation (GET), then do it (POST); `?id=` names the jobs."""
        if not self.has_operate_permission(request):
            raise PermissionDenied
        jobs = self._named_jobs(request)
        kind = ReasonForm if verb == "cancel" else NoForm
        form = kind(request.POST if request.method == "POST" else None)
        if request.method == "POST" and form.is_valid():
            self._run(request, verb, jobs, form.cleaned_data.get("reason", ""))
            return HttpResponseRedirect(self._way_back(request, jobs))
        context = {
            **self.frame(request, ngettext(*_TITLES[verb], len(jobs))),
            "jobs": jobs,
            "form": form,
            "verb": verb,
            "back": self._way_back(request, jobs),
        }
        return TemplateResponse(request, "admin/echomq/job/confirm.html", context)

    def _to_confirmation(
        self, request: HttpRequest, queryset: QuerySet[Job], verb: str
    ) -> HttpResponseBase | None:
        ids = list(queryset.order_by("-id").values_list("pk", flat=True)[: MOST + 1])
        if len(ids) > MOST:
            text = _("Select at most %(most)d jobs at a time.") % {"most": MOST}
            self.message_user(request, text, ERROR)
            return None
        return HttpResponseRedirect(self._address(request, verb, ids))

    def _address(self, request: HttpRequest, verb: str, ids: Iterable[object]) -> str:
        query = [("id", str(id)) for id in ids]
        return f"{self.url('job', verb)}?{urlencode(query)}&{self.get_preserved_filters(request)}"

    def _named_jobs(self, request: HttpRequest) -> list[Job]:
        try:
            ids = [JobId.parse(text) for text in request.GET.getlist("id")]
        except WrongBrand as error:
            raise Http404(str(error)) from error
        wanted = self.get_queryset(request).filter(pk__in=ids[:MOST])
        jobs = list(wanted.defer("arguments", "result", "errors").order_by("-id"))
        if not jobs:
            raise Http404("There are no such jobs.")
        return jobs

    def _way_back(self, request: HttpRequest, jobs: list[Job]) -> str:
        if len(jobs) == 1:
            page = self.url("job", "change", jobs[0].pk)
            filters = self.get_preserved_filters(request)
        else:
            page = self.url("job", "changelist")
            filters = request.GET.get("_changelist_filters", "")
        return f"{page}?{filters}" if filters else page

    def _run(self, request: HttpRequest, verb: str, jobs: list[Job], reason: str) -> None:
        answers: Counter[str] = Counter()
        for job in jobs:
            try:
                if verb == "cancel":
                    answer: str = control.cancel(job.pk, reason or None, kind="admin")
                else:
                    answer = control.retry(job.pk)
            except EchoMQError as error:
                self.message_user(request, f"{job}: {error}", ERROR)
                continue
            answers[answer] += 1
            said = f"{verb}: {answer}" + (f" ({reason})" if reason else "")
            self.log_change(request, job, said)
        for answer, count in answers.items():
            text, level = _ANSWERS[answer]
            self.message_user(request, ngettext(*text, count) % {"count": count}, level)


_TITLES = {"cancel": ("Cancel job", "Cancel jobs"), "retry": ("Retry job", "Retry jobs")}

_ANSWERS = {
    "cancelled": (
        ("%(count)d job was cancelled.", "%(count)d jobs were cancelled."),
        SUCCESS,
    ),
    "requested": (
        (
            "%(count)d job runs; its handler was asked to stop.",
            "%(count)d jobs run; their handlers were asked to stop.",
        ),
        SUCCESS,
    ),
    "finished": (
        ("%(count)d job was finished already.", "%(count)d jobs were finished already."),
        WARNING,
    ),
    "retried": (
        ("%(count)d job is ready to run again.", "%(count)d jobs are ready to run again."),
        SUCCESS,
    ),
    "unfinished": (
        ("%(count)d job waits or runs already.", "%(count)d jobs wait or run already."),
        WARNING,
    ),
    "duplicate": (
        (
            "%(count)d job is unique, and another one of its key waits or runs.",
            "%(count)d jobs are unique, and others of their keys wait or run.",
        ),
        WARNING,
    ),
    "completed": (
        (
            "%(count)d job has completed and isn't run twice.",
            "%(count)d jobs have completed and aren't run twice.",
        ),
        WARNING,
    ),
}
