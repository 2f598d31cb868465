"""What `echomq_job` does that isn't one call of `jobs.control`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db.models import Q

from ..core.ids import JobId
from ..exceptions import UnknownJob
from ..models import CancelRequest, Job

COLUMNS = ("id", "task", "queue", "state", "attempt", "enqueued_at", "finished_at", "reason")


def condition(options: dict[str, Any]) -> Q:
    """Return the filter that the command line names."""
    found = Q()
    for option, field in (("queue", "queue"), ("task", "task_path"), ("state", "state")):
        if options.get(option):
            found &= Q(**{field: options[option]})
    if options.get("group"):
        found &= Q(group_key=f"group:{options['group']}")
    return found


def rows(using: str, where: Q, limit: int) -> Iterator[dict[str, Any]]:
    """List jobs, the newest first."""
    for job in Job.objects.using(using).filter(where).order_by("-pk")[:limit]:
        yield summary(job)


def summary(job: Job) -> dict[str, Any]:
    """Return what a line of the list says."""
    return {
        "id": str(job.pk),
        "task": job.task_path,
        "queue": job.queue,
        "state": job.state,
        "attempt": job.attempt,
        "enqueued_at": job.enqueued_at,
        "finished_at": job.finished_at,
        "reason": job.cancel_reason,
    }


def whole(using: str, text: str) -> dict[str, Any]:
    """Return all there is to know of a job. Raises `WrongBrand`, `UnknownJob`."""
    id = JobId.parse(text)
    job = Job.objects.using(using).filter(pk=id).first()
    if job is None:
        raise UnknownJob(f"There is no job {id}.")
    asked = CancelRequest.objects.using(using).filter(job=id).first()
    return {
        **summary(job),
        "priority": job.priority,
        "run_after": job.run_after,
        "max_attempts": job.max_attempts,
        "started_at": job.started_at,
        "attempted_at": job.attempted_at,
        "worker": job.worker_name,
        "progress": job.progress,
        "progress_note": job.progress_note,
        "parked": job.parked,
        "cancel_requested": None if asked is None else {"reason": asked.reason, "kind": asked.kind},
        "options": job.options,
        "arguments": job.arguments,
        "result": job.result,
        "errors": job.errors,
    }
