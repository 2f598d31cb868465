"""The replay: each earthquake goes into the log, and then onto the feed."""

from __future__ import annotations

import time
from typing import Any

from echomq_app import events
from echomq_app.jobs.context import JobContext
from echomq_app.jobs.tasks_api import task
from echomq_app.stream import Receipt, Stream

from .quakes import FASTEST, QUAKE, QUEUE, SLOWEST, STREAM, TOTAL, week

REPORT_EVERY = 0.25
"""Seconds between two reports of progress."""


@task(takes_context=True, queue_name=QUEUE)
def replay(context: JobContext, *, speed: float) -> dict[str, int]:
    """Append the week to the log, `speed` earthquakes a second; return what was added.

    May run any number of times, also after a worker was killed in the middle: the
    USGS id is the idempotency key, so the log takes each earthquake once. What the
    log has already is passed over without waiting, and isn't announced again.

    The log comes first. An event without a record would be a lie; a record whose
    event never came is what the feed's readers must expect anyway.
    """
    if not SLOWEST <= speed <= FASTEST:
        raise ValueError(f"speed has to be {SLOWEST:g} to {FASTEST:g} a second, not {speed!r}.")
    stream = Stream(STREAM)
    pace = _Pace(speed)
    added = duplicates = 0
    reported = float("-inf")
    for number, quake in enumerate(week(), start=1):
        context.cancel.raise_if_cancelled()
        receipt = stream.append(
            quake, type=quake["type"], key=quake["net"], idempotency_key=quake["id"]
        )
        if receipt.duplicate:
            duplicates += 1
        else:
            added += 1
            events.publish(QUEUE, QUAKE, context.job_id, _announcement(receipt, quake))
        now = time.monotonic()
        if now - reported >= REPORT_EVERY:
            reported = now
            context.progress(number / TOTAL, _note(added, duplicates))
        if not receipt.duplicate:
            # A cancel ends the wait at once; the token is looked at above.
            context.cancel.wait(pace.pause())
    context.progress(1.0, _note(added, duplicates))
    return {"added": added, "duplicates": duplicates}


class _Pace:
    """Steps at a steady rate; time lost in one step isn't made up by a burst."""

    def __init__(self, rate: float) -> None:
        self._step = 1 / rate
        self._due = time.monotonic()

    def pause(self) -> float:
        """Return the seconds to wait until the next step."""
        now = time.monotonic()
        self._due = max(self._due + self._step, now)
        return self._due - now


def _announcement(receipt: Receipt, quake: dict[str, Any]) -> dict[str, Any]:
    return {
        "epoch": receipt.epoch,
        "position": receipt.position,
        "id": str(receipt.id),
        "quake": quake,
    }


def _note(added: int, duplicates: int) -> str:
    if not duplicates:
        return f"{added:,} added"
    return f"{added:,} added, {duplicates:,} already in the log"
