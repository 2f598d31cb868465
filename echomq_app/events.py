"""The lossy feed: what happens to jobs right now, for whoever listens right now.

At most once, by contract. An event with no live listener is gone, and so is one that
falls into a listener's reconnect; zero receivers is success. What must not be lost
belongs into a `Stream`. A listener is told with a `Gap` where something may be missing.

Publishing never waits for the broker and never raises because of it: a loss is logged
and signalled (`signals.publish_failed`). A wrong argument raises, before any I/O.

    events.publish("emails", "progress", context.job_id, {"fraction": 0.5})

    async with events.listen("emails") as feed:
        async for item in feed:
            if isinstance(item, events.Gap): ...
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from django.db import transaction

from . import engine
from .conf import current
from .core.event import Event, Gap, WireEvent, from_wire, to_wire
from .core.hint import Hint
from .core.ids import JobId
from .core.names import check_queue_name, events_group
from .feed import EVENTS, Feed

logger = logging.getLogger("echomq.events")

__all__ = [
    "NAMES",
    "Event",
    "Feed",
    "Gap",
    "apublish",
    "apublish_many",
    "listen",
    "publish",
    "publish_many",
    "publish_on_commit",
    "unpack",
]

NAMES = frozenset(
    {
        "enqueued",
        "started",
        "progress",
        "completed",
        "failed",
        "retrying",
        "cancel_requested",
        "cancelled",
        "stalled",
    }
)
"""What the app itself publishes. An application may publish names of its own."""

MERGE_EVENTS = 500
MERGE_BYTES = 262_144
"""Messages that wait for the broker are merged up to this many events and bytes."""

NewEvent = Event | tuple[str, JobId | str] | tuple[str, JobId | str, Any]


def publish(queue: str, event: str, job_id: JobId | str, data: Any = None) -> int | None:
    """Tell whoever listens to `queue` that `event` happened to the job.

    Returns the number of receivers where that can be told (no broker: the listeners in
    this process), else None; zero is success. Doesn't wait: a process that ends at once
    calls `engine.flush()` first. Events of one process to one queue stay in order.
    Inside a transaction use `publish_on_commit`, or listeners hear of what may be rolled
    back.

    Raises `WrongBrand`, `InvalidName` or `InvalidPayload` before anything is sent.
    """
    limit = current().MAX_RECORD_BYTES
    return send_wire(check_queue_name(queue), [to_wire(event, job_id, data, limit=limit)])


async def apublish(queue: str, event: str, job_id: JobId | str, data: Any = None) -> int | None:
    """See `publish`, which doesn't block either."""
    return publish(queue, event, job_id, data)


def publish_many(queue: str, events: Iterable[NewEvent]) -> int | None:
    """Publish several events of one queue as one message; see `publish`.

    Each is `(event, job_id)`, `(event, job_id, data)` or an `Event` of this queue. All
    are checked before the message is sent; no events, no message.
    """
    wire = _to_wire(check_queue_name(queue), events)
    return send_wire(queue, wire) if wire else 0


async def apublish_many(queue: str, events: Iterable[NewEvent]) -> int | None:
    """See `publish_many`, which doesn't block either."""
    return publish_many(queue, events)


def publish_on_commit(
    queue: str, event: str, job_id: JobId | str, data: Any = None, *, using: str | None = None
) -> None:
    """Publish when the transaction on database `using` commits, and not if it doesn't.

    Checked, and `data` fixed, right now. Without a transaction it is published at once.
    """
    limit = current().MAX_RECORD_BYTES
    wire = [to_wire(event, job_id, data, limit=limit)]
    hint = Hint(partial(send_wire, check_queue_name(queue), wire))
    transaction.on_commit(hint, using=using, robust=True)


def listen(*queues: str, buffer: int = 10_000) -> Feed:
    """Return a `Feed` of these queues, to be entered with `async with`.

    All feeds of a process share one connection to the broker. `buffer`: how many events
    wait for a slow reader before it loses some.
    """
    return Feed(queues, buffer)


def unpack(message: Mapping[str, Any]) -> list[Event]:
    """Return the events in a message that a Channels consumer was handed.

    For a consumer that joins `names.events_group(queue)` by itself:

        async def echomq_events(self, message):
            for event in events.unpack(message): ...
    """
    return from_wire(message)


def _to_wire(queue: str, events: Iterable[NewEvent]) -> list[WireEvent]:
    limit = current().MAX_RECORD_BYTES
    wire = []
    for item in events:
        if isinstance(item, Event):
            if item.queue != queue:
                raise ValueError(f"An event of queue {item.queue!r} can't go to {queue!r}.")
            wire.append(to_wire(item.event, item.job_id, item.data, limit=limit))
        else:
            event, job_id, *rest = item
            if len(rest) > 1:
                raise ValueError(f"An event is (event, job_id, data), not {item!r:.200}.")
            wire.append(to_wire(event, job_id, rest[0] if rest else None, limit=limit))
    return wire


class _Message(dict[str, Any]):
    """A message of events that knows its size, so that merging needn't count."""

    size = 0


taps: list[Callable[[Event], None]] = []
"""Who sees each event that this process sends; for tests."""


def send_wire(queue: str, wire: list[WireEvent]) -> int | None:
    """Send events that are checked and encoded: the app's own. See `publish_many`."""
    message = _Message(type=EVENTS, queue=queue, events=wire)
    for tap in taps:
        for event in from_wire(message):
            try:
                tap(event)
            except Exception:
                logger.exception("event=failed doing=tap tap=%r", tap)
    message.size = sum(len(event["data"] or "") + 64 for event in wire)
    return engine.send(events_group(queue), message, merge=_merge)


def _merge(waiting: dict[str, Any], new: dict[str, Any]) -> bool:
    if not (isinstance(waiting, _Message) and isinstance(new, _Message)):
        return False
    events, size = waiting["events"], waiting.size + new.size
    if len(events) + len(new["events"]) > MERGE_EVENTS or size > MERGE_BYTES:
        return False
    events.extend(new["events"])
    waiting.size = size
    return True
