"""`--drain`: when a worker has nothing to do any more."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ..models.queue import Queue
from ..models.times import now
from . import looks

logger = logging.getLogger("echomq.jobs")


def is_done(using: str, queues: Collection[str]) -> bool:
    """Tell whether no job of these queues is due, those of paused ones aside.

    A paused queue is nothing to wait for: who resumes it, and when, is nobody's promise. What
    it holds is left, and the log says so.
    """
    paused = set(Queue.objects.using(using).paused().values_list("pk", flat=True))
    busy = {*looks.with_ready_jobs(using, queues), *looks.due(using, queues, now()).queues}
    if busy - paused:
        return False
    for queue in sorted(busy):
        logger.warning("event=paused_queue_not_drained queue=%s", queue)
    return True
