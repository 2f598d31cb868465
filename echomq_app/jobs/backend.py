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

import dataclasses
import datetime as dt
from collections.abc import Iterable
from typing import Any

from django.core import checks
from django.db import connections, router, transaction

from ..core.ids import JobId
from ..core.names import check_queue_name
from ..core.payload import decode, encode
from ..exceptions import InvalidArgument, InvalidName, WrongBrand
from ..models.job import TASK_PATH_MAX, Job
from ..models.threads import in_database_thread
from ..models.times import as_django, aware
from ..models.transactions import is_aborted
from .announcing import tell
from .arguments import Call, as_result, checked, encoded, encoded_many
from .enqueueing import NewJob, enqueue
from .enqueueing_many import enqueue_many
from .options import JobOptions
from .results import JobResult, result_of, results_like
from .tasks import EchoMQTask, checking_result, options_of
from .tasks_api import (
    DEFAULT_TASK_BACKEND_ALIAS,
    BaseTaskBackend,
    DummyBackend,
    ImmediateBackend,
    InvalidTask,
    Task,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_enqueued,
)

CHECKED_MAX = 1_000
"""Tasks whose validation is remembered."""


class EchoMQBackend(BaseTaskBackend):
    """Stores jobs in the database that the routers choose for `echomq_app.models.Job`."""

    task_class = EchoMQTask
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self._checked: dict[Task, tuple[NewJob, JobOptions]] = {}

    def validate_task(self, task: Task) -> None:
        """Refuse a task that can't be stored, or whose options are wrong; at import."""
        super().validate_task(task)
        _validate(task, self.options)

    def enqueue(  # type: ignore[override]  # the stubs' result is generic
        self, task: Task, args: Any, kwargs: Any
    ) -> JobResult:
        """Write the job, in the caller's transaction if there is one.

        A unique job of which there is one already gives that one's result, with `duplicate`
        set, and sends no signal.

        Raises `InvalidTask`, and `InvalidPayload` for arguments that aren't strict JSON
        or too large (`ECHOMQ["MAX_RECORD_BYTES"]`); then nothing was written.
        """
        return self._told(self._enqueue(task, args, kwargs))

    def _enqueue(self, task: Task, args: Any, kwargs: Any) -> JobResult:
        new, options = self._new_job(task)
        arguments = encoded(args, kwargs)
        values = decode(arguments)  # as they come back
        if options.unique:
            key = options.unique_key(task.module_path, values)
            new = dataclasses.replace(new, unique_key=key)
        done = enqueue(router.db_for_write(Job), new, arguments.decode())
        if done.duplicate:
            first = self.get_result(done.id)
            object.__setattr__(first, "duplicate", True)
            return first
        at = as_django(done.enqueued_at)
        return self._result(task, done.id, done.state.value, at, values)

    def enqueue_many(self, task: Task, calls: Iterable[Call]) -> list[JobResult]:
        """Write a job for each `(args, kwargs)`, all or none; see `enqueue`.

        Much quicker than one by one: hundreds go with a statement. (Unique jobs don't: each
        has to see whether it is the first.) Raises `InvalidArgument` for what is no such pair.
        """
        new, options = self._new_job(task)
        using = router.db_for_write(Job)
        pairs = checked(calls)
        results: list[JobResult] = []
        if options.unique:
            with transaction.atomic(using=using):
                results += [self._enqueue(task, args, kwargs) for args, kwargs in pairs]
        else:
            for batch in enqueue_many(using, new, encoded_many(pairs)):
                at, values = as_django(batch.enqueued_at), decode(batch.arguments)
                first = self._result(task, batch.ids[0], batch.state.value, at, values[0])
                results += results_like(first, batch.ids, values)
        for result in results:
            self._told(result)
        return results

    def _result(
        self, task: Task, id: str, state: str, enqueued_at: dt.datetime, values: Any
    ) -> JobResult:
        """Return the result of what was enqueued."""
        return JobResult(
            task=task,
            id=id,
            status=TaskResultStatus.READY,
            enqueued_at=enqueued_at,
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=values["args"],
            kwargs=values["kwargs"],
            backend=self.alias,
            errors=[],
            worker_ids=[],
            state=state,
        )

    def _told(self, result: JobResult) -> JobResult:
        """Send Django's signal, if it was enqueued. What receivers raise is logged."""
        if result.duplicate:
            return result
        failed = tell(task_enqueued, type(self), result)
        # Without an error, the commit of a transaction that PostgreSQL has given up is a rollback
        # that nobody hears of.
        if failed is not None and is_aborted(connections[router.db_for_write(Job)]):
            raise failed
        return result

    def _new_job(self, task: Task) -> tuple[NewJob, JobOptions]:
        """Validate a task, as `using()` may have made it, and resolve its options; once."""
        known = self._checked.get(task)
        if known is None:
            self.validate_task(task)
            options = options_of(task, self.options)
            stored: dict[str, Any] = options.to_store()
            if self.alias != DEFAULT_TASK_BACKEND_ALIAS:
                stored["backend"] = self.alias
            group = options.group_key(task.module_path)
            new = NewJob(
                queue=task.queue_name,
                task_path=task.module_path,
                priority=task.priority,
                run_after=None if task.run_after is None else aware(task.run_after, None),
                max_attempts=options.max_attempts,
                options=encode(stored).decode(),
                unique_for=options.unique_for,
                group_key=group,
                group_limit=options.group_limit if group else None,
                retention=options.retention,
            )
            known = new, options
            if task.run_after is None:  # else nearly each one is another
                if len(self._checked) >= CHECKED_MAX:
                    self._checked.clear()
                self._checked[task] = known
        return known

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

    async def aenqueue(  # type: ignore[override]  # as above
        self, task: Task, args: Any, kwargs: Any
    ) -> JobResult:
        """See enqueue()."""
        # Django's own leaves the connection open, which outside a request nobody closes.
        return await in_database_thread(self.enqueue, task, args, kwargs)

    async def aget_result(self, result_id: str) -> JobResult:
        """See get_result()."""
        return await in_database_thread(self.get_result, result_id)

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        """Check OPTIONS. (`echomq_app.checks` looks at QUEUES and the database.)"""
        try:
            JobOptions.made_of(self.options)
        except InvalidArgument as error:
            return [
                checks.Error(
                    f"TASKS[{self.alias!r}]['OPTIONS']: {error}",
                    hint="They are the defaults of every task's options; see docs/jobs.md.",
                    id="echomq.E006",
                )
            ]
        return []


class EchoMQImmediateBackend(ImmediateBackend):
    """Django's ImmediateBackend that takes our `@task(max_attempts=…)` and gives JobContext.

    For development and tests: runs the task inside `enqueue`, once, without a database. What
    EchoMQBackend refuses, it refuses.
    """

    task_class = EchoMQTask

    def validate_task(self, task: Task) -> None:
        """See EchoMQBackend."""
        super().validate_task(task)
        _validate(task, self.options)

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> Any:
        """Run the task. Raises `InvalidPayload` as EchoMQBackend does.

        A result that can't be stored makes the task a failed one, with `InvalidResult`.
        """
        encoded(args, kwargs)
        with checking_result(as_result):
            return super().enqueue(task, args, kwargs)

    def enqueue_many(self, task: Task, calls: Iterable[Call]) -> list[Any]:
        """Run the calls, one after the other, if EchoMQBackend takes all of them."""
        return [self.enqueue(task, args, kwargs) for args, kwargs in _all_taken(calls)]


class EchoMQDummyBackend(DummyBackend):
    """Django's DummyBackend that takes our `@task(max_attempts=…)`: stores, runs nothing.

    What EchoMQBackend refuses, it refuses.
    """

    task_class = EchoMQTask

    def validate_task(self, task: Task) -> None:
        """See EchoMQBackend."""
        super().validate_task(task)
        _validate(task, self.options)

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> Any:
        """Keep the call. Raises `InvalidPayload` as EchoMQBackend does."""
        encoded(args, kwargs)
        return super().enqueue(task, args, kwargs)

    def enqueue_many(self, task: Task, calls: Iterable[Call]) -> list[Any]:
        """Keep the calls, all or none."""
        return [self.enqueue(task, args, kwargs) for args, kwargs in _all_taken(calls)]


def _all_taken(calls: Iterable[Call]) -> list[Call]:
    pairs = checked(calls)
    for args, kwargs in pairs:
        encoded(args, kwargs)
    return pairs


def _validate(task: Task, defaults: dict[str, Any]) -> None:
    try:
        check_queue_name(task.queue_name)
        options_of(task, defaults)
    except (InvalidName, InvalidArgument) as error:
        raise InvalidTask(str(error)) from error
    if len(task.module_path) > TASK_PATH_MAX:
        raise InvalidTask(f"The path of a task has at most {TASK_PATH_MAX} characters.")
