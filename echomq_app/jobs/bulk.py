"""Enqueue many calls of one task at once.

from echomq_app.jobs.bulk import call, enqueue_many

enqueue_many(send_mail, [call(user.email, lang="en") for user in users])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..exceptions import InvalidArgument
from ..models.threads import in_database_thread
from .results import JobResult
from .tasks_api import Task

Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:
    """Return the arguments of one call."""
    return args, kwargs


def enqueue_many(task: Task, calls: Iterable[Call]) -> list[JobResult]:
    """Enqueue a job for each call, all or none, in the caller's transaction if there is one.

    Returns their results in the order of the calls. Every backend is asked with the task it
    would be asked with one by one: `enqueue_many(task.using(priority=5), ...)`. Raises what
    `enqueue` raises, and `InvalidArgument` for what no `call` made and a backend that isn't ours.
    """
    backend = task.get_backend()
    many = getattr(backend, "enqueue_many", None)
    if many is None:
        raise InvalidArgument(
            f"The backend {task.backend!r} is {type(backend).__name__}, which can't enqueue many "
            "at once. Use EchoMQBackend, or call enqueue() for each."
        )
    results: list[JobResult] = many(task, calls)
    return results


async def aenqueue_many(task: Task, calls: Iterable[Call]) -> list[JobResult]:
    """See enqueue_many()."""
    return await in_database_thread(enqueue_many, task, list(calls))
