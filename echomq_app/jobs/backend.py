"""The TASKS backend: Django's `@task` functions as durable, cancellable jobs.

    TASKS = {
        "default": {
            "BACKEND": "echomq_app.jobs.backend.EchoMQBackend",
            "QUEUES": ["default", "mail"],
            "OPTIONS": {"max_attempts": 5},
        }
    }

`enqueue` writes in the caller's transaction: if that rolls back there is no job, and no
worker sees it before the commit, so `transaction.on_commit` isn't needed. Jobs run in
`manage.py echomq_worker`, at least once each: see `docs/jobs.md`.
"""

from __future__ import annotations

from typing import Any

from django.core import checks
from django.db import router

from ..core.ids import JobId
from ..core.names import check_queue_name
from ..core.payload import encode
from ..exceptions import InvalidArgument, InvalidName, InvalidPayload, WrongBrand
from ..models.job import TASK_PATH_MAX, Job
from .enqueueing import NewJob, enqueue
from .options import JobOptions
from .results import JobResult, as_django, result_of
from .tasks import EchoMQTask, options_of
from .tasks_api import (
    DEFAULT_TASK_BACKEND_ALIAS,
    BaseTaskBackend,
    DummyBackend,
    ImmediateBackend,
    InvalidTask,
    Task,
    TaskResultDoesNotExist,
    TaskResultStatus,
    normalize_json,
    task_enqueued,
)


class EchoMQBackend(BaseTaskBackend):
    """Stores jobs in the database that the routers choose for `echomq_app.models.Job`."""

    task_class = EchoMQTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def validate_task(self, task: Task) -> None:
        """Refuse a task that can't be stored, or whose options are wrong; at import."""
        super().validate_task(task)
        try:
            check_queue_name(task.queue_name)
            options_of(task, self.options)
        except (InvalidName, InvalidArgument) as error:
            raise InvalidTask(str(error)) from error
        if len(task.module_path) > TASK_PATH_MAX:
            raise InvalidTask(f"The path of a task has at most {TASK_PATH_MAX} characters.")

    def enqueue(  # type: ignore[override]  # the stubs' result is generic
        self, task: Task, args: Any, kwargs: Any
    ) -> JobResult:
        """Write the job, in the caller's transaction if there is one.

        Raises `InvalidTask`, and `InvalidPayload` for arguments that aren't strict JSON
        or too large (`ECHOMQ["MAX_RECORD_BYTES"]`); then nothing was written.
        """
        self.validate_task(task)
        values = _plain({"args": list(args), "kwargs": dict(kwargs)})
        new = NewJob(
            queue=task.queue_name,
            task_path=task.module_path,
            args=values["args"],
            kwargs=values["kwargs"],
            priority=task.priority,
            run_after=as_aware(task.run_after),
            options=options_of(task, self.options),
            backend="" if self.alias == DEFAULT_TASK_BACKEND_ALIAS else self.alias,
        )
        done = enqueue(router.db_for_write(Job), new)
        result = JobResult(
            task=task,
            id=str(done.id),
            status=TaskResultStatus.READY,
            enqueued_at=as_django(done.enqueued_at),
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=new.args,
            kwargs=new.kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
            state=done.state.value,
        )
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> JobResult:
        """Read a job by its id. Works whatever has become of the task's code.

        Raises `TaskResultDoesNotExist`, also for an id of another kind.
        """
        try:
            job_id = JobId.parse(result_id)
        except WrongBrand as error:
            raise TaskResultDoesNotExist(result_id) from error
        job = Job.objects.using(router.db_for_write(Job)).filter(pk=job_id).first()
        if job is None:
            raise TaskResultDoesNotExist(result_id)
        return result_of(job, self.alias)

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check OPTIONS. (`echomq_app.checks` looks at QUEUES and the database.)"""
        try:
            JobOptions.made_of(self.options)
        except InvalidArgument as error:
            return [
                checks.Error(
                    f"TASKS[{self.alias!r}]['OPTIONS']: {error}",
                    hint="They are the defaults of every task's options; see docs/jobs.md.",
                    id="echomq.E010",
                )
            ]
        return []


class EchoMQImmediateBackend(ImmediateBackend):
    """Django's ImmediateBackend that takes our `@task(max_attempts=…)` and gives JobContext.

    For development and tests: runs the task inside `enqueue`, once, without a database.
    """

    task_class = EchoMQTask


class EchoMQDummyBackend(DummyBackend):
    """Django's DummyBackend that takes our `@task(max_attempts=…)`: stores, runs nothing."""

    task_class = EchoMQTask


def as_aware(value: Any) -> Any:
    """Return a time of this project as an aware one."""
    from ..models.times import aware

    return None if value is None else aware(value, None)


def _plain(values: dict[str, Any]) -> Any:
    """Return what Django makes of arguments, or say in our words what can't be stored."""
    try:
        return normalize_json(values)
    except (TypeError, ValueError) as error:
        encode(values, what="the job's arguments")
        raise InvalidPayload(f"The job's arguments can't be stored as JSON: {error}") from error
