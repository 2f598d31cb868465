"""What a project's type checker says about tasks: `make lint` is the test.

mypy runs strict over this file, so an ignore that isn't needed is an error too: each of
them here is an error that a project has to see. What follows runs as well.
"""

from __future__ import annotations

import dataclasses
from typing import assert_type

import pytest

from echomq_app.exceptions import InvalidArgument
from echomq_app.jobs.context import JobContext
from echomq_app.jobs.options import JobOptions, JobOptionsGiven, job_options
from echomq_app.jobs.results import JobResult
from echomq_app.jobs.tasks import EchoMQTask
from echomq_app.jobs.tasks_api import InvalidTask, task


@task(queue_name="mail", takes_context=True)
@job_options(max_attempts=5, timeout=60, unique=True, process=False)
def send(context: JobContext, to: str, *, copies: int = 1) -> int:
    return copies


@task(takes_context=True)
async def asend(context: JobContext, to: str) -> list[str]:
    return [to]


@task
async def aplain(number: int) -> str:
    return str(number)


@task
def plain(number: int) -> str:
    return str(number)


def test_the_checkers_options_are_those_there_are() -> None:
    fields = {field.name for field in dataclasses.fields(JobOptions)}
    assert set(JobOptionsGiven.__annotations__) == fields
    assert fields <= {field.name for field in dataclasses.fields(EchoMQTask)}


def test_using_knows_djangos_attributes_and_job_options() -> None:
    urgent = send.using(priority=5, unique="welcome:7", group="mail", concurrency=2, timeout=None)
    assert isinstance(urgent, EchoMQTask)
    assert (urgent.priority, urgent.unique, urgent.concurrency) == (5, "welcome:7", 2)
    assert type(plain.using(process=True, retention=60.0)) is type(plain)


def test_using_refuses_what_is_none() -> None:
    with pytest.raises(TypeError):
        plain.using(uniqe=True)  # type: ignore[call-arg]
    with pytest.raises(InvalidTask):
        plain.using(max_attempts="many")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        job_options(timout=60)  # type: ignore[call-arg]


def enqueues() -> None:
    """Never called: the calls are for the checker."""
    assert_type(plain.using(unique=True).enqueue(1).return_value, str)
    result = send.enqueue("me", copies=2)
    assert_type(result.return_value, int)
    stored: JobResult = plain.get_result(result.id)
    assert_type((stored.state, stored.cancel_kind), tuple[str, str | None])
    str(result.progres)  # type: ignore[attr-defined]
    assert_type(aplain.enqueue(1).return_value, str)
    assert_type(asend.using(priority=1).enqueue("me").return_value, list[str])
    plain.using(unique=True).enqueue("one")  # type: ignore[arg-type]
    send.enqueue(to="me", copy=2)  # type: ignore[call-arg]
