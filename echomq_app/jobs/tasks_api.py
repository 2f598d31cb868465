"""Django's Tasks API, wherever it lives: the one place that knows.

`django.tasks` from Django 6.0 on, the `django-tasks` package before. The rest of the
app, and projects that support both, import from here.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeAlias,
    TypeVar,
    Unpack,
    overload,
)

import django
from django.core.exceptions import ImproperlyConfigured

if TYPE_CHECKING or django.VERSION >= (6, 0):
    from django.tasks import DEFAULT_TASK_BACKEND_ALIAS, task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.backends.dummy import DummyBackend
    from django.tasks.backends.immediate import ImmediateBackend
    from django.tasks.base import TASK_REFRESH_ATTRS, TaskError, TaskResultStatus
    from django.tasks.exceptions import (
        InvalidTask,
        InvalidTaskBackend,
        TaskResultDoesNotExist,
        TaskResultMismatch,
    )
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from django.utils.json import normalize_json
else:
    try:
        from django_tasks import DEFAULT_TASK_BACKEND_ALIAS, task, task_backends
    except ImportError as error:
        raise ImproperlyConfigured(
            "Django before 6.0 has no Tasks API of its own. Install the package that "
            "backports it: pip install 'django-echomq[django52]' (or django-tasks)."
        ) from error
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.backends.dummy import DummyBackend
    from django_tasks.backends.immediate import ImmediateBackend
    from django_tasks.base import (
        TASK_REFRESH_ATTRS,
        Task,
        TaskContext,
        TaskError,
        TaskResult,
        TaskResultStatus,
    )
    from django_tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch

    try:  # Django's names, which the package has after 0.12
        from django_tasks.exceptions import InvalidTask, InvalidTaskBackend
    except ImportError:
        from django_tasks.exceptions import InvalidTaskBackendError as InvalidTaskBackend
        from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.signals import task_enqueued, task_finished, task_started
    from django_tasks.utils import normalize_json

if TYPE_CHECKING:
    # For type checkers Django's classes are generic, and its `task` knows neither
    # JobContext nor options of a backend.
    import datetime as dt

    from django.tasks import base

    from .options import JobOptionsGiven
    from .results import JobResult

    P = ParamSpec("P")
    R = TypeVar("R")

    Task: TypeAlias = base.Task[..., Any]
    TaskResult: TypeAlias = base.TaskResult[..., Any]
    TaskContext: TypeAlias = base.TaskContext[..., Any]

    class JobTaskResult(JobResult, Generic[R]):
        """What a `JobTask` gives, for type checkers alone: what the handler returned has a type."""

        @property
        def return_value(self) -> R: ...

    class JobTask(base.Task[P, R]):
        """What `task` returns, for type checkers alone: a task with job options."""

        # mypy takes a result of any parameters for no result of these parameters.
        def enqueue(  # type: ignore[override]
            self, *args: P.args, **kwargs: P.kwargs
        ) -> JobTaskResult[R]: ...
        async def aenqueue(  # type: ignore[override]
            self, *args: P.args, **kwargs: P.kwargs
        ) -> JobTaskResult[R]: ...
        def get_result(  # type: ignore[override]
            self, result_id: str
        ) -> JobTaskResult[R]: ...
        async def aget_result(  # type: ignore[override]
            self, result_id: str
        ) -> JobTaskResult[R]: ...
        def using(
            self,
            *,
            priority: int | None = None,
            queue_name: str | None = None,
            run_after: dt.datetime | None = None,
            backend: str | None = None,
            **options: Unpack[JobOptionsGiven],
        ) -> Self: ...

    # What an async function returns is what its coroutine does.
    class _Decorator(Protocol):
        @overload
        def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> JobTask[P, R]: ...
        @overload
        def __call__(self, function: Callable[P, R], /) -> JobTask[P, R]: ...

    class _ContextDecorator(Protocol):
        @overload
        def __call__(
            self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], /
        ) -> JobTask[P, R]: ...
        @overload
        def __call__(self, function: Callable[Concatenate[Any, P], R], /) -> JobTask[P, R]: ...

    @overload
    def task(function: Callable[P, Coroutine[Any, Any, R]], /) -> JobTask[P, R]: ...
    @overload
    def task(function: Callable[P, R], /) -> JobTask[P, R]: ...
    @overload
    def task(
        *,
        priority: int = ...,
        queue_name: str = ...,
        backend: str = ...,
        takes_context: Literal[True],
        **options: Unpack[JobOptionsGiven],
    ) -> _ContextDecorator: ...
    @overload
    def task(
        *,
        priority: int = ...,
        queue_name: str = ...,
        backend: str = ...,
        takes_context: Literal[False] = ...,
        **options: Unpack[JobOptionsGiven],
    ) -> _Decorator: ...
    def task(*args: Any, **kwargs: Any) -> Any: ...

elif django.VERSION >= (6, 0):
    from django.tasks import task
    from django.tasks.base import Task, TaskContext, TaskResult

__all__ = [
    "DEFAULT_TASK_BACKEND_ALIAS",
    "TASK_REFRESH_ATTRS",
    "BaseTaskBackend",
    "DummyBackend",
    "ImmediateBackend",
    "InvalidTask",
    "InvalidTaskBackend",
    "Task",
    "TaskContext",
    "TaskError",
    "TaskResult",
    "TaskResultDoesNotExist",
    "TaskResultMismatch",
    "TaskResultStatus",
    "normalize_json",
    "task",
    "task_backends",
    "task_enqueued",
    "task_finished",
    "task_started",
]
