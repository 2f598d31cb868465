"""What is told about jobs: one shape for the log (`emq.<queue>`) and the feed.

An entry is written in the transaction that makes it true, and published after its
commit. On PostgreSQL it goes to the outbox, from where the relay moves it into the
queue's stream: nobody holds that stream's lock while a client thinks. On SQLite, where
there is one writer anyway, it is appended at once.

Every entry has `id`, `task`, `state`, `attempt` and `at`. The final ones (`completed`,
`failed`, `cancelled`) have `reason` and `finished_at` too.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
from django.db import connections

from .. import events
from ..core.event import WireEvent
from ..core.ids import JobId
from ..core.names import queue_stream
from ..models import appending
from ..models.times import aware

logger = logging.getLogger("echomq.jobs")

ENQUEUED = "enqueued"
STARTED = "started"
PROGRESS = "progress"
COMPLETED = "completed"
FAILED = "failed"
RETRYING = "retrying"
CANCEL_REQUESTED = "cancel_requested"
CANCELLED = "cancelled"
STALLED = "stalled"


class Entry(NamedTuple):
    """One thing that happened to a job."""

    queue: str
    event: str
    job_id: JobId
    data: dict[str, Any]


def timestamp(value: dt.datetime | None) -> str | None:
    """Return a time as the journal writes it: ISO 8601 in UTC, with microseconds."""
    if value is None:
        return None
    return _text(value if value.tzinfo is dt.UTC else aware(value, None))


@lru_cache(maxsize=64)  # those of a batch are mostly the same
def _text(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).isoformat(timespec="microseconds")


def write(using: str, entries: Sequence[Entry]) -> None:
    """Record entries in the caller's transaction, in this order within a queue."""
    if not entries:
        return
    by_queue: dict[str, list[bytes]] = {}
    for entry in entries:
        text = msgspec.json.encode(
            {"type": entry.event, "key": str(entry.job_id), "data": entry.data}
        )
        by_queue.setdefault(entry.queue, []).append(text)
    connection = connections[using]
    if connection.vendor == "sqlite":
        for queue in sorted(by_queue):
            appending.append(using, queue_stream(queue), by_queue[queue])
        return
    with connection.cursor() as cursor:
        for queue, texts in by_queue.items():
            records = b"[" + b",".join(texts) + b"]"
            cursor.execute(
                "INSERT INTO echomq_outbox (stream, record, xact)"
                " SELECT %s, e.record, NULL"
                " FROM jsonb_array_elements(%s::jsonb) WITH ORDINALITY AS e(record, n)"
                " WHERE pg_current_xact_id() IS NOT NULL ORDER BY e.n",
                (queue_stream(queue), records.decode()),
            )


def publish(entries: Iterable[Entry]) -> None:
    """Send committed entries to the feed: one message per queue. Never raises."""
    by_queue: dict[str, list[WireEvent]] = {}
    for queue, event, id, data in entries:
        try:
            # What is ours is strict JSON: it went to the log. (But for progress.)
            text = msgspec.json.encode(data).decode()
        except Exception:
            logger.exception("event=publish_failed queue=%s job=%s", queue, id)
            continue
        by_queue.setdefault(queue, []).append({"event": event, "job_id": data["id"], "data": text})
    for queue, wire in by_queue.items():
        publish_wire(queue, wire)


def publish_wire(queue: str, wire: list[WireEvent]) -> None:
    """Send committed events of one queue to the feed, as `publish` does. Never raises."""
    try:
        events.send_wire(queue, wire)
    except Exception:
        logger.exception("event=publish_failed queue=%s count=%d", queue, len(wire))
