"""Trim a stream from its page: a dry run first, then exactly what it said."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib.messages import SUCCESS
from django.core.exceptions import PermissionDenied
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..core.ids import MAX_POSITION
from ..models import Stream as StreamRow
from ..stream import Stream
from .readonly import home

if TYPE_CHECKING:
    from .changelist import KeysetAdmin

    _Base = KeysetAdmin
else:
    _Base = object


class TrimForm(forms.Form):
    """What to keep. What any of the limits no longer retains goes."""

    max_records = forms.IntegerField(
        label=gettext_lazy("Keep the newest"),
        required=False,
        min_value=0,
        max_value=MAX_POSITION,
        help_text=gettext_lazy("records"),
    )
    max_days = forms.FloatField(
        label=gettext_lazy("Keep what is younger than"),
        required=False,
        min_value=0,
        max_value=36_500,
        help_text=gettext_lazy("days"),
    )
    before = forms.IntegerField(
        label=gettext_lazy("Keep from position"),
        required=False,
        min_value=0,
        max_value=MAX_POSITION,
    )

    def clean(self) -> None:
        """Ask for a limit: an empty form would mean the retention policy."""
        if not self.errors and all(value is None for value in self.cleaned_data.values()):
            self.add_error(None, _("Fill in one of the limits."))

    def limits(self) -> dict[str, Any]:
        """Return the arguments of `Stream.trim`."""
        days = self.cleaned_data["max_days"]
        return {
            "max_records": self.cleaned_data["max_records"],
            "max_age": None if days is None else dt.timedelta(days=days),
            "before": self.cleaned_data["before"],
        }


class Trimming(_Base):
    """For who may delete records: a link on a stream's page, and the page behind it."""

    change_form_template = "admin/echomq/stream/change_form.html"

    def has_trim_permission(self, request: HttpRequest) -> bool:
        """Tell whether the user may trim: Django's "can delete record"."""
        return bool(request.user.has_perm("echomq.delete_record"))

    def get_urls(self) -> list[URLPattern]:
        # Not in a request's transaction: it would hold the stream's lock while records go.
        view = transaction.non_atomic_requests(self.admin_site.admin_view(self.trim_view))
        own = path("<int:pk>/trim/", view, name="echomq_stream_trim")
        return [own, *super().get_urls()]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        if self.has_trim_permission(request):
            context["trim_url"] = self.url("stream", "trim", context["original"].pk)
        return super().render_change_form(request, context, *args, **kwargs)

    def trim_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Ask for limits (GET), say what they would remove (POST), remove it (POST, confirmed)."""
        if not self.has_trim_permission(request):
            raise PermissionDenied
        row = self.get_queryset(request).filter(pk=pk).first()
        if row is None:
            raise Http404("There is no such stream.")
        stream = Stream(row.name, using=home(StreamRow))
        form = TrimForm(request.POST if request.method == "POST" else None)
        outcome = None
        if form.is_valid():
            if "confirmed" in request.POST:
                return self._trim(request, row, stream, form)
            outcome = stream.trim(**form.limits(), dry_run=True)
        context = {
            **self.frame(request, _("Trim stream")),
            "original": row,
            "form": form,
            "outcome": outcome,
            "back": self.url("stream", "change", row.pk),
        }
        return TemplateResponse(request, "admin/echomq/stream/trim.html", context)

    def _trim(
        self, request: HttpRequest, row: StreamRow, stream: Stream, form: TrimForm
    ) -> HttpResponse:
        done = stream.trim(**form.limits())
        text = ngettext(
            "%(count)d record was removed.", "%(count)d records were removed.", done.trimmed
        )
        self.message_user(request, text % {"count": done.trimmed}, SUCCESS)
        self.log_change(
            request, row, f"trim: removed {done.trimmed} records below {done.first_position}"
        )
        return HttpResponseRedirect(self.url("stream", "change", row.pk))
