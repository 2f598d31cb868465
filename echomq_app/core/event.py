"""What the feed carries: events of jobs, checked, on the wire, and read back.

On the wire an event is a dict of three texts, `data` being JSON text: what was
published is fixed at once, whatever the caller does with its dict later, integers
beyond 64 bits survive any layer's serializer, and a page can pass it on unparsed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ..exceptions import InvalidName
from . import payload
from .ids import JobId
from .names import TYPE_MAX, check_queue_name

WireEvent = dict[str, str | None]

_EVENT_NAME = re.compile(r"[A-Za-z0-9._:-]+\Z")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a job. `event` is what, `data` any JSON value."""

    queue: str
    event: str
    job_id: JobId
    data: Any = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Events may be missing here; reload what you show from the database.

    `reason` is `reconnect` (the link to the broker broke), `joined late` (the broker
    didn't answer when the feed was opened), `lost` (a sender's number is missing: the
    broker or the sender dropped messages) or `overflow` (this reader was too slow).
    """

    reason: str


def to_wire(event: str, job_id: JobId | str, data: Any, *, limit: int) -> WireEvent:
    """Check an event and return its wire form; raise `WrongBrand` and the like."""
    job = JobId.parse(job_id)
    text = None if data is None else payload.encode(data, limit=limit).decode()
    return {"event": check_event_name(event), "job_id": str(job), "data": text}


def from_wire(message: Mapping[str, Any]) -> list[Event]:
    """Return the events of a message; raise ValueError, KeyError or TypeError if it has none."""
    queue = check_queue_name(message["queue"])
    return [
        Event(
            queue=queue,
            event=check_event_name(item["event"]),
            job_id=JobId.parse(item["job_id"]),
            data=None if item["data"] is None else payload.decode(item["data"]),
        )
        for item in message["events"]
    ]


def check_event_name(name: object) -> str:
    """Return `name` if an event may be called so; raise `InvalidName`."""
    if not isinstance(name, str) or len(name) > TYPE_MAX or not _EVENT_NAME.match(name):
        raise InvalidName(
            f"An event name is a str of 1 to {TYPE_MAX} ASCII letters, digits, '.', '_', '-' "
            f"and ':', not {name!r:.120}."
        )
    return name
