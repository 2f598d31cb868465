"""Our siblings of Django's Immediate and Dummy backends: whatever our backend takes, they take."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from echomq_app.exceptions import InvalidArgument, InvalidPayload, InvalidResult
from echomq_app.jobs.bulk import call, enqueue_many
from echomq_app.jobs.context import JobContext
from echomq_app.jobs.options import JobOptions, job_options
from echomq_app.jobs.tasks import EchoMQTask
from echomq_app.jobs.tasks_api import InvalidTask, TaskResultStatus, task, task_backends
from tests import jobtasks
from tests.contract import tasks_api_tasks
from tests.contract.tasks_api_tasks import plain
from tests.jobtasks import UNSTORABLE, marks

tasks: Any = tasks_api_tasks

IMMEDIATE = "echomq_app.jobs.backend.EchoMQImmediateBackend"
DUMMY = "echomq_app.jobs.backend.EchoMQDummyBackend"


def with_context(context: JobContext, value: int) -> list[Any]:
    """Use all that a JobContext has that Django's hasn't."""
    context.check()
    context.progress(0.5, "half")
    return [context.attempt, str(context.job_id)[:3], context.cancel.cancelled, value]


async def with_context_async(context: JobContext, value: int) -> list[Any]:
    return with_context(context, value)


@pytest.fixture(params=[IMMEDIATE, DUMMY])
def sibling(request: pytest.FixtureRequest, settings: Any) -> str:
    settings.TASKS = {
        "default": {"BACKEND": request.param, "QUEUES": [], "OPTIONS": {"backoff": 1}}
    }
    return str(request.param)


def test_take_every_option(sibling: str) -> None:
    made: Any = task(max_attempts=5, backoff=0.5, timeout=60, unique=True)(plain)
    assert (type(made), made.max_attempts, made.timeout) == (EchoMQTask, 5, 60)
    job_options(max_attempts=2)(made)
    assert made.enqueue(1).status in {TaskResultStatus.SUCCESSFUL, TaskResultStatus.READY}
    assert made.using(priority=3, timeout=5).enqueue(1).task.timeout == 5


def test_every_option_is_a_keyword_of_the_task() -> None:
    names = {field.name for field in dataclasses.fields(JobOptions)}
    assert names <= {field.name for field in dataclasses.fields(EchoMQTask)}


def test_refuse_what_the_real_one_refuses(sibling: str) -> None:
    with pytest.raises(InvalidTask, match="max_attempts"):
        task(max_attempts=0)(plain)
    with pytest.raises(InvalidArgument):
        job_options(max_attempts=0)(plain)
    with pytest.raises(InvalidTask, match="queue name"):
        task(queue_name="no such name")(plain)
    for wrong in (object(), float("nan"), "a\0b"):
        with pytest.raises(InvalidPayload):
            tasks.give_back.enqueue(wrong)


@pytest.mark.parametrize("sibling", [IMMEDIATE], indirect=True)
def test_immediate_runs_with_a_job_context(sibling: str) -> None:
    for function in (with_context, with_context_async):
        result: Any = task(takes_context=True)(function).enqueue(7)
        assert result.return_value == [1, "JOB", False, 7]


@pytest.mark.parametrize("sibling", [IMMEDIATE], indirect=True)
async def test_immediate_runs_in_async_code(sibling: str) -> None:
    result: Any = await task(takes_context=True)(with_context_async).aenqueue(7)
    assert result.return_value == [1, "JOB", False, 7]


def test_take_many_all_or_none(sibling: str) -> None:
    results = enqueue_many(tasks.give_back, [call(n) for n in range(3)])
    assert [list(result.args) for result in results] == [[0], [1], [2]]
    backend: Any = task_backends["default"]
    kept = len(getattr(backend, "results", []))
    for wrong, error in ((call(object()), InvalidPayload), ((1, 2), InvalidArgument)):
        with pytest.raises(error):
            enqueue_many(tasks.give_back, [call(1), wrong])  # type: ignore[list-item]
    assert len(getattr(backend, "results", [])) == kept


@pytest.mark.parametrize("sibling", [IMMEDIATE], indirect=True)
def test_immediate_keeps_the_error(sibling: str) -> None:
    (error,) = tasks.raise_unusual.enqueue().errors
    assert error.exception_class is tasks.Unusual


@pytest.mark.parametrize("sibling", [DUMMY], indirect=True)
def test_dummy_keeps_and_runs_nothing(sibling: str) -> None:
    backend: Any = task_backends["default"]
    result = tasks.raise_value_error.enqueue()
    assert [stored.id for stored in backend.results] == [result.id]
    assert tasks.raise_value_error.get_result(result.id).status == TaskResultStatus.READY
    backend.clear()
    assert backend.results == []


@pytest.mark.parametrize("sibling", [IMMEDIATE], indirect=True)
@pytest.mark.parametrize("what", UNSTORABLE)
def test_immediate_refuses_a_result_that_could_not_be_stored(
    sibling: str, what: str, tmp_path: Path
) -> None:
    trace = str(tmp_path / "trace")
    for function in (jobtasks.returns, jobtasks.areturns):
        result: Any = function.enqueue(what, trace)
        assert result.status == TaskResultStatus.FAILED
        (error,) = result.errors
        assert error.exception_class is InvalidResult and UNSTORABLE[what][1] in error.traceback
    assert marks(trace) == ["ran", "ran"]


def outer(value: Any) -> Any:
    """Call another task as a function; what that returns is nobody's result."""
    return len(tasks.give_back.call({1: value})[0])


@pytest.mark.parametrize("sibling", [IMMEDIATE], indirect=True)
def test_immediate_lets_tasks_call_each_other(sibling: str) -> None:
    result: Any = task(outer).enqueue(1)
    assert result.return_value == 1
