"""Tasks of the contract suite, plain Django tasks without any option of ours."""

from __future__ import annotations

import asyncio
from typing import Any

from echomq_app.jobs.tasks_api import Task, TaskContext, task


@task
def double(value: Any) -> Any:
    return value * 2


@task
async def adouble(value: Any) -> Any:
    await asyncio.sleep(0)
    return value * 2


@task(priority=7, queue_name="mail")
def with_defaults() -> None:
    pass


@task
def give_back(*args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs]


@task
def nothing() -> None:
    """Return nothing."""


@task
def raise_value_error() -> None:
    raise ValueError("This task fails.")


@task
async def araise_value_error() -> None:
    raise ValueError("This task fails.")


class Unusual(Exception):
    """An error that no other module knows."""


@task
def raise_unusual() -> None:
    raise Unusual from KeyError("the cause")


@task
def raise_keyboard_interrupt() -> None:
    raise KeyboardInterrupt


@task
def unstorable() -> object:
    return object()


@task(takes_context=True)
def tell_context(context: TaskContext, word: str = "") -> dict[str, Any]:
    return {
        "attempt": context.attempt,
        "id": context.task_result.id,
        "status": str(context.task_result.status),
        "path": context.task_result.task.module_path,
        "args": context.task_result.args,
        "word": word,
    }


@task(takes_context=True)
async def atell_context(context: TaskContext) -> int:
    return context.attempt


class Holder:
    """Has a function that is no task of a module."""

    def method(self) -> None:
        pass


def plain(value: Any) -> Any:
    return value


def context_is_not_first(value: Any, context: Any) -> None:
    pass


ALL: list[Task] = [double, adouble, with_defaults]
