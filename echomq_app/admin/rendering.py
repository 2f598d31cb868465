"""How values look on the pages. Everything is escaped; nothing is inline."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any, Literal

from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..models.fields import UndecodableJSON

EMPTY = "-"
FOLD_OVER = 4_000
"""Longer texts are folded away, in characters."""


def moment(
    value: dt.datetime | None, precision: Literal["seconds", "milliseconds"] = "milliseconds"
) -> SafeString | str:
    """Show a time in the current time zone."""
    if value is None:
        return EMPTY
    local = timezone.localtime(value) if timezone.is_aware(value) else value
    text = local.replace(tzinfo=None).isoformat(sep=" ", timespec=precision)
    return format_html('<time class="echomq-time" datetime="{}">{}</time>', local.isoformat(), text)


def number(value: int | None) -> str:
    """Show a count with its thousands apart."""
    return EMPTY if value is None else f"{value:,}"


def duration(value: dt.timedelta | None) -> str:
    """Show how long something took or lasts, to two figures."""
    if value is None:
        return EMPTY
    seconds = value.total_seconds()
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    parts = []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count:.0f} {unit}")
    return " ".join(parts[:2])


def retention(max_records: int | None, max_age: dt.timedelta | None) -> str:
    """Say in words what a retention policy keeps."""
    parts = []
    if max_records is not None:
        parts.append(
            ngettext("newest %(count)s record", "newest %(count)s records", max_records)
            % {"count": number(max_records)}
        )
    if max_age is not None:
        parts.append(duration(max_age))
    return ", ".join(parts) or _("keeps all")


def code(value: object) -> SafeString:
    """Show an id or a token, to be copied."""
    return format_html('<code class="echomq-code">{}</code>', value)


def pretty_json(value: Any) -> SafeString:
    """Show a JSON value indented, folded when it is long; its text where Python can't read it."""
    if isinstance(value, UndecodableJSON):
        return block(value)
    try:
        return block(json.dumps(value, indent=2, ensure_ascii=False))
    except RecursionError:
        return block(_("Nested too deeply to be shown."))


def block(text: str) -> SafeString:
    """Show text as it is, folded when it is long."""
    pre = format_html('<pre class="echomq-pre">{}</pre>', text)
    if len(text) <= FOLD_OVER:
        return pre
    size = _("%(count)s characters") % {"count": number(len(text))}
    return format_html("<details><summary>{}</summary>{}</details>", size, pre)


def lines(*texts: object) -> SafeString:
    """Show texts under each other."""
    return format_html_join("", "<div>{}</div>", ((text,) for text in texts if text != ""))


def badge(kind: str, text: object) -> SafeString:
    """Show a state; `kind` picks its colour."""
    return format_html('<span class="echomq-state {}">{}</span>', kind, text)


def progress(fraction: float | None, note: str) -> SafeString | str:
    """Show how far a job says it is."""
    if fraction is None:
        return note or EMPTY
    percent = f"{fraction:.0%}"
    return format_html(
        '<span class="echomq-progress"><progress value="{}" max="1">{}</progress> {} {}</span>',
        f"{fraction:.4f}",
        percent,
        percent,
        note,
    )


def errors(records: list[dict[str, Any]]) -> SafeString | str:
    """Show what a job's attempts raised, the newest first."""
    if not records:
        return EMPTY
    shown = [
        (
            record.get("class", ""),
            record.get("message", ""),
            _("attempt %(attempt)s, %(worker)s, %(at)s")
            % {name: record.get(name, EMPTY) for name in ("attempt", "worker", "at")},
            block(record.get("traceback", "")),
        )
        for record in reversed(records)
    ]
    return format_html_join(
        "",
        '<div class="echomq-error"><h4>{}: {}</h4><p>{}</p>{}</div>',
        shown,
    )


def link(url: str, text: object) -> SafeString:
    """Show a link."""
    return format_html('<a href="{}">{}</a>', url, text)


def shortened(text: str, longest: int = 80) -> str:
    """Cut a text for a list."""
    return text if len(text) <= longest else f"{text[:longest]}…"
