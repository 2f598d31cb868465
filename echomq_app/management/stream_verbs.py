"""What `echomq_stream` does that isn't one call of `Stream`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..core.records import Page, StreamRecord, TrimResult
from ..models import Outbox, retention
from ..models import Stream as StreamRow
from ..models.each import for_each
from ..models.overview import Overview, named, overview, with_ends
from ..stream import Stream

STREAM_COLUMNS = (
    *("name", "first_position", "write_cursor", "count", "oldest_at", "newest_at", "epoch"),
)
RECORD_COLUMNS = ("position", "recorded_at", "type", "key", "data")
TRIM_COLUMNS = ("stream", "first_position", "trimmed", "dry_run")
RELAY_COLUMNS = ("stream", "moved", "waiting")

_RELAY_PATIENCE = 5.0
_PROGRESS_EVERY = 0.5


def overviews(using: str, prefix: str) -> Iterator[Overview]:
    """List streams by name."""
    rows = named(StreamRow.objects.using(using).order_by("name"), prefix)
    return map(overview, with_ends(rows).iterator())


def one_page(pages: Sequence[Page]) -> dict[str, Any]:
    """Join pages to one, which ends where the last one does."""
    last = pages[-1]
    return {
        "records": [record for page in pages for record in page.records],
        "cursor": last.cursor,
        "token": last.token,
        "first_position": last.first_position,
        "write_cursor": last.write_cursor,
        "epoch": last.epoch,
    }


def apply_retention(using: str, dry_run: bool) -> list[TrimResult]:
    """Trim every stream to the policy in force."""
    return retention.apply_retention(using, dry_run=dry_run)


def relay(using: str, name: str | None) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Move all that waits in the outbox; return for each stream how many, and what is left.

    And the streams for which it failed, with the reason: the others were moved.

    Where somebody else holds the stream's lock, it is tried again for a few seconds.
    """
    waiting = Outbox.objects.using(using)
    if name is None:
        names = list(waiting.order_by("stream").values_list("stream", flat=True).distinct())
    else:
        names = [name]
    results: list[dict[str, Any]] = []

    def move(names: Sequence[str]) -> None:
        (each,) = names
        stream, deadline = Stream(each, using=using), time.monotonic() + _RELAY_PATIENCE
        result: dict[str, Any] = {"stream": each, "moved": 0, "waiting": True}
        results.append(result)
        while (count := stream.relay()) != 0 and time.monotonic() < deadline:
            if count is None:
                time.sleep(0.05)
            else:
                result["moved"] += count
                deadline = time.monotonic() + _RELAY_PATIENCE
        result["waiting"] = count != 0 and waiting.filter(stream=each).exists()

    failures = for_each(using, names, move, doing="relay")
    return results, {failure.item: str(failure.error).strip() for failure in failures}


class Progress:
    """Counts on a terminal's standard error; silent where that is no terminal."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._shown = stream.isatty()

    def count(self, records: Iterable[StreamRecord]) -> Iterator[StreamRecord]:
        """Pass records on, and show now and then how many they were."""
        number, due = 0, time.monotonic() + _PROGRESS_EVERY
        for number, record in enumerate(records, start=1):
            yield record
            if self._shown and time.monotonic() >= due:
                self._show(number, "\r")
                due = time.monotonic() + _PROGRESS_EVERY
        if self._shown:
            self._show(number, "\n")

    def _show(self, number: int, end: str) -> None:
        self._stream.write(f"{number:,} records", ending=end)
        self._stream.flush()
