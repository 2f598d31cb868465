"""The task class of our backends, and how a stored path becomes a task again."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Self, Unpack

from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from ..exceptions import UnknownTask
from .context import JobContext
from .options import JobOptions, JobOptionsGiven, declared
from .tasks_api import (
    BaseTaskBackend,
    InvalidTask,
    InvalidTaskBackend,
    Task,
    TaskContext,
    task_backends,
)

_result_check: ContextVar[Callable[[Any], object] | None] = ContextVar(
    "echomq_result_check", default=None
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EchoMQTask(Task):
    """A task that may carry its job options: `@task(max_attempts=5)`.

    Such keyword arguments need Django 6.1 (or django-tasks); `@job_options` says the same
    everywhere, and `.using(unique="order:7")` for one enqueue. `None` leaves the option to
    `@job_options` and the backend's OPTIONS.
    """

    max_attempts: int | None = None
    backoff: float | None = None
    backoff_max: float | None = None
    timeout: float | None = None
    unique: bool | str | None = None
    unique_for: float | None = None
    group: str | None = None
    concurrency: int | None = None
    retention: float | None = None
    process: bool | None = None

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: dt.datetime | None = None,
        backend: str | None = None,
        **options: Unpack[JobOptionsGiven],
    ) -> Self:
        """Return the task with other attributes, Django's or job options.

        Raises `InvalidTask` for a wrong one, TypeError for one that doesn't exist.
        """
        attributes: dict[str, Any] = {
            "priority": priority,
            "queue_name": queue_name,
            "run_after": run_after,
            "backend": backend,
        }
        given = {name: value for name, value in attributes.items() if value is not None}
        return dataclasses.replace(self, **given, **options)

    def __deepcopy__(self, memo: Any) -> Self:
        """Return itself: it can't be changed, and nor can what it consists of."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by path, as Django 6.1 does; here on every Django."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["func"]
        return _again, (type(self), self.module_path, values)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function; a backend that knows only Django's context gets ours made."""
        check = _result_check.get()
        # For this call alone: what the function itself calls gives no job's result.
        token = _result_check.set(None)
        try:
            value = Task.call(self, *_with_job_context(self, args), **kwargs)
        finally:
            _result_check.reset(token)
        if check is not None:
            check(value)
        return value

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """See call()."""
        return await Task.acall(self, *_with_job_context(self, args), **kwargs)


@contextmanager
def checking_result(check: Callable[[Any], object]) -> Iterator[None]:
    """Have the next `Task.call` pass what its function returns to `check`, which may raise."""
    token = _result_check.set(check)
    try:
        yield
    finally:
        _result_check.reset(token)


def _with_job_context(task: Task, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if task.takes_context and args and type(args[0]) is TaskContext:
        return (JobContext.detached(args[0].task_result), *args[1:])
    return args


def _again(kind: type[EchoMQTask], path: str, values: dict[str, Any]) -> EchoMQTask:
    try:
        function = load_task(path).func
    except (ImportError, UnknownTask) as error:
        raise ValueError(f"Expected {path!r} to point to a Task instance.") from error
    return kind(func=function, **values)


def options_of(task: Task, defaults: Mapping[str, Any]) -> JobOptions:
    """Resolve a task's options; raise `InvalidArgument` for a wrong one."""
    own = {
        field.name: value
        for field in dataclasses.fields(JobOptions)
        if (value := getattr(task, field.name, None)) is not None
    }
    return JobOptions.made_of(defaults, declared(task.func), own)


def load_task(path: str) -> Task:
    """Import the task that a job names.

    Raises what the import raises, and `UnknownTask` where there is something else.
    """
    try:
        found = import_string(path)
    except SystemExit as error:  # of a script, or a setting that is missing: not our process' end
        raise UnknownTask(
            f"{path} can't be imported: its module ends the process ({error!r}) when it is."
        ) from error
    if not isinstance(found, Task):  # type: ignore[misc]  # not generic at run time
        raise UnknownTask(
            f"{path} is {type(found).__name__}, not a task. Was the @task decorator removed? "
            "Put it back, or cancel the job."
        )
    return found


def task_for(path: str, *, backend: str, **attributes: Any) -> Task:
    """Return the task of a stored job, whatever has become of its code.

    A result has to name a task even if its module is gone: then it is one of the same
    path that can't be called. `attributes` (queue, priority, run_after) are left out
    where the settings no longer allow them.
    """
    try:
        task = load_task(path)
    except Exception:  # noqa: BLE001  (an import may raise anything, and none is ours)
        task = EchoMQTask(func=_missing(path), backend=backend)
    return as_enqueued(task, backend=backend, **attributes)


def as_enqueued(task: Task, **attributes: Any) -> Task:
    """Return the task as `using()` made it before it was enqueued, where that may still be."""
    changed = tuple([(name, new) for name, new in attributes.items() if getattr(task, name) != new])
    return _changed(task, changed) if changed else task


@lru_cache(maxsize=1_000)  # each new task is validated, and a queue's jobs are of few
def _changed(task: Task, attributes: tuple[tuple[str, Any], ...]) -> Task:
    try:
        return dataclasses.replace(task, **dict(attributes))
    except (InvalidTask, InvalidTaskBackend):
        return task


@lru_cache(maxsize=100)
def backend_class(alias: str) -> type[BaseTaskBackend]:
    """Return the class of a backend: who sends Django's signals of its tasks."""
    return type(task_backends[alias])


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting == "TASKS":
        _changed.cache_clear()
        backend_class.cache_clear()


setting_changed.connect(_forget, dispatch_uid="echomq.tasks")


def _missing(path: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise UnknownTask(f"There is no task {path} any more.")

    module, _, name = path.rpartition(".")
    call.__module__, call.__name__, call.__qualname__ = module, name, name
    return call
