"""Pause and resume queues. `echomq_app.jobs.control` has these too."""

from __future__ import annotations

import dataclasses
import datetime as dt
from functools import partial

from django.db import router, transaction

from .. import engine
from ..core.names import check_queue_name, queue_wake_group
from ..core.payload import encode
from ..models.queue import Queue
from ..models.threads import in_database_thread
from ..models.times import now_as_django
from ..models.transactions import after_commit

REASON_MAX = 65_536
"""Bytes of a reason in JSON."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PausedQueue:
    """A queue from which nothing is claimed."""

    name: str
    paused_at: dt.datetime
    reason: str | None


def pause(queue: str, reason: str | None = None) -> bool:
    """Let no worker claim from a queue any more; False if it is paused already.

    From the commit on: claims that begin later find nothing, on every worker. Jobs that run
    go on, and enqueueing does too. Raises `InvalidName`, `InvalidPayload`.
    """
    check_queue_name(queue)
    encode(reason or "", limit=REASON_MAX, what="the reason")
    using = router.db_for_write(Queue)
    with transaction.atomic(using=using, savepoint=False):
        return Queue.objects.using(using).pause(queue, reason or "", now_as_django())


async def apause(queue: str, reason: str | None = None) -> bool:
    """See pause()."""
    return await in_database_thread(pause, queue, reason)


def resume(queue: str) -> bool:
    """Let workers claim from a queue again, and wake them; False if it wasn't paused."""
    check_queue_name(queue)
    using = router.db_for_write(Queue)
    changed = Queue.objects.using(using).resume(queue)
    if changed:
        after_commit(using, partial(engine.notify, queue_wake_group(queue)))
    return changed


async def aresume(queue: str) -> bool:
    """See resume()."""
    return await in_database_thread(resume, queue)


def paused() -> list[PausedQueue]:
    """Return the queues that are paused, by name."""
    using = router.db_for_write(Queue)
    rows = Queue.objects.using(using).paused().order_by("name")
    return [
        PausedQueue(name=row.name, paused_at=row.paused_at, reason=row.pause_reason or None)
        for row in rows
        if row.paused_at is not None
    ]


async def apaused() -> list[PausedQueue]:
    """See paused()."""
    return await in_database_thread(paused)
