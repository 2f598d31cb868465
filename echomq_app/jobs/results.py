"""A job's row as Django's TaskResult, with what Django's four states can't say."""

from __future__ import annotations

import dataclasses
import inspect
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any

from ..core.payload import decode
from ..models.job import Job, JobState
from ..models.times import as_django
from .claims import ClaimedJob
from .outcomes import Verdict
from .tasks import as_enqueued, task_for
from .tasks_api import (
    DEFAULT_TASK_BACKEND_ALIAS,
    TASK_REFRESH_ATTRS,
    Task,
    TaskError,
    TaskResult,
    TaskResultStatus,
    task_backends,
)

CANCELLED_PATH = "echomq_app.exceptions.JobCancelled"

STATUS = {
    JobState.READY: TaskResultStatus.READY,
    JobState.SCHEDULED: TaskResultStatus.READY,
    JobState.RUNNING: TaskResultStatus.RUNNING,
    JobState.COMPLETED: TaskResultStatus.SUCCESSFUL,
    JobState.FAILED: TaskResultStatus.FAILED,
    JobState.CANCELLED: TaskResultStatus.FAILED,
}
_REFRESHED = (
    *TASK_REFRESH_ATTRS,
    *("state", "cancel_reason", "cancel_kind", "progress", "progress_note"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobResult(TaskResult):  # type: ignore[misc]  # frozen, in Django itself
    """Django's task result, and the job's own state.

    `id` is the JOB id. A cancelled job has the status FAILED, and the class path of its
    last error is `echomq_app.exceptions.JobCancelled`. `state` is one of `ready`,
    `scheduled`, `running`, `completed`, `failed`, `cancelled`.
    """

    state: str = JobState.READY.value
    cancel_reason: str | None = None
    cancel_kind: str | None = None
    """Who asked to cancel it (`user`, `admin`, …); None if nobody did."""
    progress: float | None = None
    progress_note: str = ""
    duplicate: bool = False
    """Only from `enqueue`: the job was there already, under the same unique key."""

    def __post_init__(self) -> None:
        """Do nothing: args and kwargs were made plain before they were stored."""

    def refresh(self) -> None:
        """Read the job again."""
        self._take(self.task.get_backend().get_result(self.id))

    async def arefresh(self) -> None:
        """See refresh()."""
        self._take(await self.task.get_backend().aget_result(self.id))

    def _take(self, other: TaskResult) -> None:
        for name in _REFRESHED:
            object.__setattr__(self, name, getattr(other, name))


_SETTERS = {
    field.name: inspect.getattr_static(JobResult, field.name).__set__
    for field in dataclasses.fields(JobResult)
}


def results_like(
    first: JobResult, ids: Sequence[str], arguments: Sequence[dict[str, Any]]
) -> list[JobResult]:
    """Return the results of jobs enqueued together, which differ by id and arguments alone.

    Field by field for all of them, inside `map`, in a sixth of the time: a frozen dataclass
    sets its fields by name, one after the other, and there are twenty.
    """
    results = list(map(object.__new__, repeat(JobResult, len(ids))))
    own: dict[str, Iterable[Any]] = {
        "id": ids,
        "args": [values["args"] for values in arguments],
        "kwargs": [values["kwargs"] for values in arguments],
        "errors": [[] for _ in ids],
        "worker_ids": [[] for _ in ids],
    }
    for name, set in _SETTERS.items():
        values = own.get(name) or repeat(getattr(first, name))
        deque(map(set, results, values), maxlen=0)
    return results


def result_of(job: Job, reader: str) -> JobResult:
    """Make the result of a stored job, also of one whose task is gone.

    `reader` is the alias of the backend that asks: it stands for the job's own where the
    settings have that no more.
    """
    backend = backend_of(_as_dict(job.options), reader)
    args, kwargs = _arguments(job.arguments)
    state = JobState(job.state)
    result = JobResult(
        task=task_for(
            job.task_path,
            backend=backend,
            queue_name=job.queue,
            priority=job.priority,
            run_after=job.run_after if state is JobState.SCHEDULED else None,
        ),
        id=str(job.pk),
        status=STATUS[state],
        enqueued_at=job.enqueued_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        last_attempted_at=job.attempted_at,
        args=args,
        kwargs=kwargs,
        backend=backend,
        errors=_errors(job.errors, state, job.cancel_reason),
        worker_ids=_worker_ids(job.errors, job.worker_name, job.attempt),
        state=state.value,
        cancel_reason=job.cancel_reason or None,
        cancel_kind=job.cancel_kind or None,
        progress=job.progress,
        progress_note=job.progress_note,
    )
    if state is JobState.COMPLETED:
        object.__setattr__(result, "_return_value", job.result)
    return result


def result_of_claim(claimed: ClaimedJob, task: Task, backend: str) -> JobResult:
    """Make the result that a running handler's context and signals carry."""
    args, kwargs = _arguments(claimed.arguments)
    return JobResult(
        task=as_enqueued(
            task, backend=backend, queue_name=claimed.queue, priority=claimed.priority
        ),
        id=str(claimed.id),
        status=TaskResultStatus.RUNNING,
        enqueued_at=as_django(claimed.enqueued_at),
        started_at=None if claimed.started_at is None else as_django(claimed.started_at),
        finished_at=None,
        last_attempted_at=None if claimed.attempted_at is None else as_django(claimed.attempted_at),
        args=args,
        kwargs=kwargs,
        backend=backend,
        errors=[error_of(record) for record in claimed.errors],
        worker_ids=_worker_ids(claimed.errors, claimed.worker_name, claimed.attempt),
        state=JobState.RUNNING.value,
    )


def result_of_end(verdict: Verdict) -> JobResult:
    """Make the result of a job that has just ended, without reading its row."""
    outcome, claimed = verdict.outcome, verdict.outcome.claimed
    backend = backend_of(_as_dict(claimed.options))
    result = result_of_claim(claimed, task_for(claimed.task_path, backend=backend), backend)
    fraction, note = outcome.progress or (None, "")
    ended: dict[str, Any] = {
        "state": verdict.state.value,
        "status": STATUS[verdict.state],
        "finished_at": as_django(outcome.at),
        "errors": _errors(verdict.errors, verdict.state, verdict.reason),
        "worker_ids": _worker_ids(verdict.errors, claimed.worker_name, verdict.attempt),
        "cancel_reason": verdict.reason or None,
        "cancel_kind": verdict.kind or None,
        "progress": fraction,
        "progress_note": note,
    }
    if verdict.state is JobState.COMPLETED and outcome.result is not None:
        ended["_return_value"] = decode(outcome.result)
    for name, value in ended.items():
        object.__setattr__(result, name, value)
    return result


def error_of(record: dict[str, Any]) -> TaskError:
    """Make Django's error of one entry in a job's `errors`."""
    return TaskError(
        exception_class_path=record.get("class", ""), traceback=record.get("traceback", "")
    )


def backend_of(options: dict[str, Any], otherwise: str = DEFAULT_TASK_BACKEND_ALIAS) -> str:
    """Return the alias of a job's backend, or `otherwise` where the settings no longer have it."""
    own = str(options.get("backend", DEFAULT_TASK_BACKEND_ALIAS))
    return own if own in task_backends.settings else otherwise


def _as_dict(stored: Any) -> dict[str, Any]:
    """Return what a column holds, also where something else than this app wrote it."""
    return stored if isinstance(stored, dict) else {}


def _arguments(stored: Any) -> tuple[list[Any], dict[str, Any]]:
    found = _as_dict(stored)
    return found.get("args", []), found.get("kwargs", {})


def _errors(records: Iterable[dict[str, Any]], state: JobState, reason: str) -> list[TaskError]:
    errors = [error_of(record) for record in records]
    if state is JobState.CANCELLED:
        told = reason or "cancelled"
        errors.append(TaskError(exception_class_path=CANCELLED_PATH, traceback=told))
    return errors


def _worker_ids(errors: Iterable[dict[str, Any]], last: str, attempt: int) -> list[str]:
    """Name the worker of each attempt: its number is what Django counts attempts by."""
    if not attempt:
        return []
    earlier = [record.get("worker", "") for record in errors if record.get("attempt", 0) < attempt]
    return [*earlier, last]
