"""Streams: where each begins and ends, and what it keeps."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib import admin
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ..core.names import STREAM_NAME_MAX, check_stream_name
from ..core.records import StreamInfo
from ..models import Stream, paging, retention
from ..models.overview import named, overview, with_ends
from . import rendering
from .changelist import FilterForm, KeysetAdmin
from .keyset import Keyset, KeysetQuery
from .readonly import home
from .trimming import Trimming

BY_NAME = Keyset(column="name", descending=False, parse=check_stream_name)


class StreamFilterForm(FilterForm):
    """Which streams: those whose names begin so."""

    name = forms.CharField(label=_("Name begins with"), required=False, max_length=STREAM_NAME_MAX)


@admin.register(Stream)
class StreamAdmin(Trimming, KeysetAdmin):
    """Lists streams by name."""

    filter_form = StreamFilterForm
    labels = (_("Before"), _("After"), _("First"))
    list_display = ("name", "records", "write_cursor", "oldest", "newest", "epoch", "kept")
    fields = (
        *("name", "records", "first_position", "head", "head_token", "oldest_at", "newest_at"),
        *("clock_ahead", "kept", "epoch", "created"),
    )
    readonly_fields = fields

    def keyset_query(self, request: HttpRequest, form: Any) -> KeysetQuery:
        rows = self.get_queryset(request)
        if not form.is_valid():
            return KeysetQuery(rows=rows.none(), keyset=BY_NAME)
        rows = named(rows, form.cleaned_data["name"])
        return KeysetQuery(rows=with_ends(rows), keyset=BY_NAME)

    # In the list: from the one statement that read it.

    @admin.display(description=_("records"))
    def records(self, row: Any) -> SafeString:
        count = overview(row).count if hasattr(row, "last_position") else self._info(row).count
        url = f"{self.url('record', 'changelist')}?{urlencode({'stream': row.name})}"
        return rendering.link(url, f"≈ {rendering.number(count)}")

    @admin.display(description=_("write cursor"))
    def write_cursor(self, row: Any) -> str:
        return rendering.number(overview(row).write_cursor)

    @admin.display(description=_("oldest"))
    def oldest(self, row: Any) -> SafeString | str:
        return rendering.moment(row.oldest_at)

    @admin.display(description=_("newest"))
    def newest(self, row: Any) -> SafeString | str:
        return rendering.moment(row.newest_at)

    @admin.display(description=_("retention"))
    def kept(self, row: Stream) -> str:
        return rendering.retention(*retention.policy(row))

    # On a stream's page: what `Stream.info` says.

    @admin.display(description=_("write cursor"))
    def head(self, row: Stream) -> str:
        return rendering.number(self._info(row).write_cursor)

    @admin.display(description=_("resume token"))
    def head_token(self, row: Stream) -> SafeString:
        return rendering.code(self._info(row).token)

    @admin.display(description=_("oldest"))
    def oldest_at(self, row: Stream) -> SafeString | str:
        return rendering.moment(self._info(row).oldest_at)

    @admin.display(description=_("newest"))
    def newest_at(self, row: Stream) -> SafeString | str:
        return rendering.moment(self._info(row).newest_at)

    @admin.display(description=_("clock ahead"))
    def clock_ahead(self, row: Stream) -> str:
        return rendering.duration(self._info(row).clock_ahead or None)

    @admin.display(description=_("created at"))
    def created(self, row: Stream) -> SafeString | str:
        return rendering.moment(row.created_at)

    def _info(self, row: Any) -> StreamInfo:
        """Read the stream once per page."""
        if not hasattr(row, "_info"):
            row._info = paging.read_info(home(Stream), row.name)
        info: StreamInfo = row._info
        return info
