"""Records: read-only, newest first, by key. The memory as it was written."""

from __future__ import annotations

import datetime as dt
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib import admin
from django.contrib.messages import ERROR
from django.core.exceptions import ValidationError
from django.db.models import Prefetch, Q, QuerySet, TextField
from django.db.models.functions import Cast, Left
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..core.ids import MAX_POSITION, EventId, event_id
from ..core.names import KEY_MAX, STREAM_NAME_MAX, TYPE_MAX
from ..core.records import token_of
from ..models import Record, Stream, trimming
from . import rendering
from .changelist import FilterForm, KeysetAdmin
from .keyset import Keyset, KeysetQuery
from .readonly import home

_SUGGESTIONS = 200
_PREVIEW = 120
_WINDOW = 10_000

BY_POSITION = Keyset(column="position", descending=True, parse=int)
BY_ID = Keyset(column="id", descending=True, parse=EventId.parse)


class RecordFilterForm(FilterForm):
    """Which records: of a stream, of a type or key in it, and where to begin."""

    stream = forms.CharField(
        label=_("Stream"),
        required=False,
        max_length=STREAM_NAME_MAX,
        widget=forms.TextInput(attrs={"list": "stream_names", "size": 20}),
    )
    type = forms.CharField(
        label=_("Type"),
        required=False,
        max_length=TYPE_MAX,
        widget=forms.TextInput(attrs={"size": 12}),
    )
    key = forms.CharField(
        label=_("Key"),
        required=False,
        max_length=KEY_MAX,
        widget=forms.TextInput(attrs={"size": 12}),
    )
    go = forms.CharField(
        label=_("Go to"),
        required=False,
        widget=forms.TextInput(attrs={"placeholder": _("position, time or EVT…"), "size": 22}),
    )

    def clean_stream(self) -> Stream | None:
        """Find the stream by its name."""
        name = self.cleaned_data["stream"]
        if not name:
            return None
        stream = Stream.objects.using(home(Stream)).filter(name=name).first()
        if stream is None:
            raise ValidationError(_("There is no such stream."))
        return stream

    def clean(self) -> None:
        """Refuse what no index could answer."""
        data = self.cleaned_data
        if not data.get("stream") and "stream" not in self.errors:
            for name in ("type", "key"):
                if data.get(name):
                    self.add_error("stream", _("Choose a stream to filter by type or key."))
                    break


@admin.register(Record)
class RecordAdmin(KeysetAdmin):
    """Lists one stream by position, or all of them by id, which is by time."""

    filter_form = RecordFilterForm
    list_display = ("position_text", "stream_link", "type", "key", "preview", "at")
    fields = (
        *("id_text", "stream_link", "position", "type", "key", "at"),
        *("idempotency_key", "token", "pretty_data", "pretty_headers"),
    )
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> QuerySet[Record]:
        # Said in so many words: a look at `record.stream` would go where routers send reads.
        streams = Prefetch("stream", Stream.objects.using(home(Stream)))
        return super().get_queryset(request).prefetch_related(streams)

    def keyset_query(self, request: HttpRequest, form: Any) -> KeysetQuery:
        rows = self.get_queryset(request)
        if not form.is_valid():
            return KeysetQuery(rows=rows.none(), keyset=BY_ID)
        stream, key, type = (form.cleaned_data[name] for name in ("stream", "key", "type"))
        listed: QuerySet[Any] = rows.defer("data", "headers").annotate(
            text=Left(Cast("data", TextField()), _PREVIEW + 1)
        )
        if stream is None:
            return KeysetQuery(rows=listed, keyset=BY_ID)
        listed = listed.filter(stream_id=stream.pk)
        if key:
            # The second half lets the planner see that the partial index holds all of them.
            listed = listed.filter(~Q(key=""), key=key)
        return KeysetQuery(
            rows=listed,
            keyset=BY_POSITION,
            condition=Q(type=type) if type else Q(),
            least=stream.first_position,
            window=_WINDOW,
        )

    def go_to(self, request: HttpRequest, form: Any) -> str | None:
        if not form.is_valid():
            return None
        text, stream = form.cleaned_data["go"].strip(), form.cleaned_data["stream"]
        try:
            if text.startswith(EventId.brand):
                return self._record_url(request, EventId.parse(text))
            below = _below(text, stream)
        except (ValueError, ValidationError) as error:
            self.message_user(request, " ".join(getattr(error, "messages", [str(error)])), ERROR)
            return None
        filters = {name: request.GET.get(name, "") for name in ("stream", "type", "key")}
        return f"{self.url('record', 'changelist')}?{urlencode({**filters, 'below': below})}"

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        names = Stream.objects.using(home(Stream)).order_by("name").values_list("name", flat=True)
        suggestions = {"stream_names": names[:_SUGGESTIONS]}
        return super().changelist_view(request, {**suggestions, **(extra_context or {})})

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        context.update(self._around(context["original"]))
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description=_("position"))
    def position_text(self, record: Record) -> str:
        return rendering.number(record.position)

    @admin.display(description=_("stream"))
    def stream_link(self, record: Record) -> SafeString | str:
        try:
            name = record.stream.name
        except Stream.DoesNotExist:  # its row was deleted by hand
            return f"#{record.stream_id}"
        return rendering.link(self.url("stream", "change", record.stream_id), name)

    @admin.display(description=_("data"))
    def preview(self, record: Any) -> str:
        return rendering.shortened(record.text, _PREVIEW)

    @admin.display(description=_("recorded at"))
    def at(self, record: Record) -> SafeString | str:
        return rendering.moment(record.recorded_at)

    @admin.display(description=_("id"))
    def id_text(self, record: Record) -> SafeString:
        return rendering.code(record.pk)

    @admin.display(description=_("resume token"))
    def token(self, record: Record) -> SafeString | str:
        try:
            epoch = record.stream.epoch
        except Stream.DoesNotExist:
            return rendering.EMPTY
        return rendering.code(token_of(epoch, record.position + 1, record.pk.tail))

    @admin.display(description=_("data"))
    def pretty_data(self, record: Record) -> SafeString:
        return rendering.pretty_json(record.data)

    @admin.display(description=_("headers"))
    def pretty_headers(self, record: Record) -> SafeString:
        return rendering.pretty_json(record.headers)

    def _record_url(self, request: HttpRequest, id: EventId) -> str:
        if not self.get_queryset(request).filter(pk=id).exists():
            raise ValidationError(_("There is no record %(id)s (any more).") % {"id": id})
        return self.url("record", "change", id)

    def _around(self, record: Record) -> dict[str, Any]:
        """Find the addresses of the neighbours, and of the list that begins here."""
        beside = dict(
            Record.objects.using(home(Record))
            .filter(
                stream_id=record.stream_id,
                position__in=(record.position - 1, record.position + 1),
            )
            .values_list("position", "id")
        )
        older, newer = (beside.get(record.position + step) for step in (-1, 1))
        return {
            "older_url": older and self.url("record", "change", older),
            "newer_url": newer and self.url("record", "change", newer),
        }


def _below(text: str, stream: Stream | None) -> object:
    """Return the key below which a list begins with what `text` names: a position or a time."""
    if text.isdecimal():
        if stream is None:
            raise ValidationError(_("Choose a stream to go to a position."))
        return int(text) + 1
    at: dt.datetime = forms.DateTimeField(
        error_messages={"invalid": _("Enter a position, a time such as 2026-11-29 18:30, or EVT….")}
    ).clean(text)
    if timezone.is_naive(at):
        at = timezone.make_aware(at)
    if stream is None:
        return event_id(max(0, int(at.timestamp() * 1000)), MAX_POSITION, 0xFFFFFFFF)
    return trimming.cursor_at(home(Record), stream.name, at) + 1
