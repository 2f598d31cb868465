"""`--drain`: when a worker has nothing to do any more."""

from __future__ import annotations

import logging
from collections.abc import Collection

from django.db.models import Q

from ..models.job import Job, JobState
from ..models.queue import Queue
from ..models.times import now_as_django

logger = logging.getLogger("echomq.jobs")


def is_done(using: str, queues: Collection[str]) -> bool:
    """Tell whether no job of these queues is due, those of paused ones aside.

    A paused queue is nothing to wait for: who resumes it, and when, is nobody's promise. What
    it holds is left, and the log says so.
    """
    due = Q(state=JobState.READY) | Q(state=JobState.SCHEDULED, run_after__lte=now_as_django())
    jobs = Job.objects.using(using).filter(due)
    paused = set(Queue.objects.using(using).paused().values_list("pk", flat=True))
    if jobs.in_queues([queue for queue in queues if queue not in paused]).exists():
        return False
    for queue in sorted(paused.intersection(queues)):
        if jobs.in_queues([queue]).exists():
            logger.warning("event=paused_queue_not_drained queue=%s", queue)
    return True
