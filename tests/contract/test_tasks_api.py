"""What Django says of tasks and their backends, asked of ours.

The same on Django's own `django.tasks` and on `django-tasks`: the imports come by
`tasks_api`. Jobs run in a worker in this process where a test needs them to run.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.core import checks
from django.db import transaction
from django.utils import timezone

from echomq_app.core.ids import new_job_id
from echomq_app.exceptions import InvalidPayload
from echomq_app.jobs.backend import EchoMQBackend
from echomq_app.jobs.tasks_api import (
    DEFAULT_TASK_BACKEND_ALIAS,
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultMismatch,
    TaskResultStatus,
    task,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from echomq_app.models import Job
from tests.contract import tasks_api_tasks
from tests.integration.jobs import finished, running_worker

pytestmark = pytest.mark.django_db(transaction=True)

tasks: Any = tasks_api_tasks
PATH = "echomq_app.jobs.backend.EchoMQBackend"
HOUR = dt.timedelta(hours=1)


def backend() -> BaseTaskBackend:
    return task_backends[DEFAULT_TASK_BACKEND_ALIAS]


def run(result: Any, **options: Any) -> Any:
    """Let a worker finish a job; return its result anew."""
    with running_worker(queues=("default", "mail"), **options):
        finished(result.id)
    return backend().get_result(result.id)


@contextmanager
def receiving(signal: Any) -> Iterator[list[tuple[Any, Any]]]:
    got: list[tuple[Any, Any]] = []

    def receive(sender: Any, task_result: Any, **kwargs: Any) -> None:
        got.append((sender, copy.copy(task_result)))

    signal.connect(receive)
    try:
        yield got
    finally:
        signal.disconnect(receive)


class TestBackend:
    def test_is_a_task_backend_that_supports_everything(self) -> None:
        ours = backend()
        assert isinstance(ours, EchoMQBackend) and isinstance(ours, BaseTaskBackend)
        assert ours.alias == DEFAULT_TASK_BACKEND_ALIAS
        assert ours.supports_defer and ours.supports_async_task
        assert ours.supports_get_result and ours.supports_priority

    def test_queues_are_default_unless_set_and_none_means_any(self, settings: Any) -> None:
        settings.TASKS = {"default": {"BACKEND": PATH}}
        assert backend().queues == {"default"}
        settings.TASKS = {"default": {"BACKEND": PATH, "QUEUES": ["a", "b", "a"]}}
        assert backend().queues == {"a", "b"}
        settings.TASKS = {"default": {"BACKEND": PATH, "QUEUES": []}}
        assert tasks.double.using(queue_name="anything").queue_name == "anything"

    def test_options_are_kept_as_given(self, settings: Any) -> None:
        settings.TASKS = {"default": {"BACKEND": PATH, "OPTIONS": {"max_attempts": 2}}}
        assert backend().options == {"max_attempts": 2}

    def test_checks_pass_for_good_settings_and_name_what_is_wrong(self, settings: Any) -> None:
        assert list(backend().check()) == []
        settings.TASKS = {"default": {"BACKEND": PATH, "OPTIONS": {"max_attempts": 0}}}
        (message,) = backend().check()
        assert isinstance(message, checks.Error) and "max_attempts" in message.msg


class TestTask:
    def test_defaults(self) -> None:
        assert isinstance(tasks.double, Task)  # type: ignore[misc]  # not generic at run time
        assert (tasks.double.priority, tasks.double.queue_name) == (0, "default")
        assert tasks.double.backend == DEFAULT_TASK_BACKEND_ALIAS
        assert tasks.double.run_after is None and not tasks.double.takes_context
        assert tasks.double.name == "double"
        assert tasks.double.module_path == f"{tasks.__name__}.double"
        assert tasks.double.get_backend() is backend()

    def test_decorator_with_arguments(self) -> None:
        assert (tasks.with_defaults.priority, tasks.with_defaults.queue_name) == (7, "mail")

    def test_is_called_directly_without_the_backend(self) -> None:
        assert tasks.double.call(21) == 42
        assert tasks.adouble.call(21) == 42
        assert not Job.objects.exists()

    async def test_is_awaited_directly(self) -> None:
        assert await tasks.double.acall(21) == 42
        assert await tasks.adouble.acall(21) == 42

    def test_cannot_be_changed(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            tasks.double.priority = 5

    def test_run_after_is_no_static_argument(self) -> None:
        with pytest.raises((TypeError, InvalidTask)):
            task(run_after=timezone.now())(tasks.plain)  # type: ignore[call-overload]


class TestUsing:
    @pytest.mark.parametrize(
        "changes",
        [
            {"priority": 5},
            {"priority": -100},
            {"queue_name": "mail"},
            {"run_after": dt.datetime(2030, 1, 1, tzinfo=dt.UTC)},
            {"priority": 100, "queue_name": "mail"},
        ],
    )
    def test_changes_a_copy(self, changes: dict[str, Any]) -> None:
        before = dataclasses.asdict(tasks.double)
        changed = tasks.double.using(**changes)
        assert changed is not tasks.double and dataclasses.asdict(tasks.double) == before
        for name, value in changes.items():
            assert getattr(changed, name) == value
        assert changed.func is tasks.double.func and type(changed) is type(tasks.double)

    def test_chains(self) -> None:
        chained = tasks.double.using(priority=1).using(queue_name="mail").using(priority=2)
        assert (chained.priority, chained.queue_name) == (2, "mail")

    def test_unknown_argument_is_refused(self) -> None:
        with pytest.raises(TypeError):
            tasks.double.using(unknown=1)

    def test_another_backend(self, settings: Any) -> None:
        entry = {"BACKEND": PATH, "QUEUES": []}
        settings.TASKS = {"default": entry, "second": entry}
        result = tasks.double.using(backend="second").enqueue(1)
        assert result.backend == "second" and result.task.get_backend().alias == "second"

    def test_unknown_backend_is_refused(self) -> None:
        with pytest.raises(Exception, match="nowhere"):
            tasks.double.using(backend="nowhere")

    def test_what_was_chosen_is_stored(self) -> None:
        later = timezone.now() + HOUR
        chosen = tasks.double.using(priority=-3, queue_name="mail", run_after=later)
        again = tasks.double.get_result(chosen.enqueue(1).id)
        assert (again.task.priority, again.task.queue_name) == (-3, "mail")
        assert again.task.run_after == later and again.status == TaskResultStatus.READY


class TestValidation:
    """By `@task`, by `using`, and again by `enqueue`."""

    def test_function_has_to_be_of_a_module(self) -> None:
        def inner() -> None:
            pass

        for function in (inner, lambda: None, tasks.Holder().method):
            with pytest.raises(InvalidTask):
                task(function)

    def test_first_argument_has_to_be_context(self) -> None:
        for function in (tasks.plain, tasks.context_is_not_first):
            with pytest.raises(InvalidTask, match="context"):
                task(takes_context=True)(function)

    @pytest.mark.parametrize("priority", [-101, 101, 1.5, 2**40])
    def test_priority_out_of_range(self, priority: Any) -> None:
        with pytest.raises(InvalidTask, match="priority"):
            tasks.double.using(priority=priority)

    @pytest.mark.parametrize("priority", [-100, 0, 100])
    def test_priority_in_range(self, priority: int) -> None:
        result = tasks.double.using(priority=priority).enqueue(1)
        assert Job.objects.get(pk=result.id).priority == priority

    def test_whole_number_that_is_a_float(self) -> None:
        result = tasks.double.using(priority=3.0).enqueue(1)
        assert Job.objects.get(pk=result.id).priority == 3

    def test_run_after_has_to_be_aware(self) -> None:
        with pytest.raises(InvalidTask, match="aware"):
            tasks.double.using(run_after=dt.datetime(2030, 1, 1))  # noqa: DTZ001

    def test_unknown_queue(self, settings: Any) -> None:
        settings.TASKS = {"default": {"BACKEND": PATH, "QUEUES": ["default"]}}
        with pytest.raises(InvalidTask, match="mail"):
            tasks.double.using(queue_name="mail")
        # Made when the settings still allowed it.
        with pytest.raises(InvalidTask, match="mail"):
            tasks.with_defaults.enqueue()
        assert not Job.objects.exists()

    @pytest.mark.parametrize("queue", ["", "a b", "ä", "x" * 200])
    def test_queue_name_that_cannot_be_one(self, queue: str) -> None:
        with pytest.raises(InvalidTask):
            tasks.double.using(queue_name=queue)

    def test_async_functions_are_fine(self) -> None:
        backend().validate_task(tasks.adouble)


class TestEnqueue:
    @pytest.mark.parametrize("function", [tasks.double, tasks.adouble])
    def test_result_is_ready(self, function: Any) -> None:
        before = timezone.now()
        result = function.enqueue(21)
        is_one: bool = isinstance(result, TaskResult)  # type: ignore[misc]
        assert is_one
        assert result.status == TaskResultStatus.READY
        assert not result.is_finished and result.attempts == 0
        assert before <= result.enqueued_at <= timezone.now()
        assert (result.started_at, result.finished_at, result.last_attempted_at) == (None,) * 3
        assert (result.args, result.kwargs, result.errors, result.worker_ids) == ([21], {}, [], [])
        assert result.task == function and result.backend == DEFAULT_TASK_BACKEND_ALIAS
        with pytest.raises(ValueError, match="not finished"):
            _ = result.return_value

    async def test_async(self) -> None:
        result = await tasks.double.aenqueue(value=21)
        assert result.kwargs == {"value": 21}
        assert (await backend().aget_result(result.id)).id == result.id

    def test_by_the_backend(self) -> None:
        result: Any = backend().enqueue(tasks.double, [21], {})
        assert Job.objects.get(pk=result.id).arguments == {"args": [21], "kwargs": {}}

    def test_ids_are_unique_and_fit_djangos_columns(self) -> None:
        ids = {tasks.double.enqueue(1).id for _ in range(20)}
        assert len(ids) == 20 and all(len(id) <= 64 for id in ids)

    def test_arguments_are_made_plain(self) -> None:
        result = tasks.give_back.enqueue((1, [2.5, None]), b"text", key={"a": (True,)})
        assert result.args == [[1, [2.5, None]], "text"]
        assert result.kwargs == {"key": {"a": [True]}}
        assert backend().get_result(result.id).args == result.args

    def test_later_changes_of_an_argument_change_nothing(self) -> None:
        value = [1]
        result = tasks.give_back.enqueue(value)
        value.append(2)
        assert result.args == [[1]]

    @pytest.mark.parametrize("wrong", [object(), {1, 2}, timezone.now(), b"\xff"])
    def test_arguments_that_are_no_json(self, wrong: Any) -> None:
        with pytest.raises((TypeError, ValueError)) as caught:
            tasks.give_back.enqueue(wrong)
        assert isinstance(caught.value, InvalidPayload) and not Job.objects.exists()

    def test_in_a_transaction_that_commits_and_one_that_does_not(self) -> None:
        with transaction.atomic():
            kept = tasks.double.enqueue(1)
        with transaction.atomic():
            undone = tasks.double.enqueue(1)
            transaction.set_rollback(True)
        assert backend().get_result(kept.id).id == kept.id
        with pytest.raises(TaskResultDoesNotExist):
            backend().get_result(undone.id)


class TestRun:
    @pytest.mark.parametrize("function", [tasks.double, tasks.adouble])
    def test_success(self, function: Any) -> None:
        result = run(function.enqueue(21))
        assert result.status == TaskResultStatus.SUCCESSFUL and result.is_finished
        assert result.return_value == 42 and result.errors == []
        assert result.enqueued_at <= result.started_at <= result.finished_at
        assert result.last_attempted_at == result.started_at
        assert result.attempts == len(result.worker_ids) == 1

    def test_none(self) -> None:
        assert run(tasks.nothing.enqueue()).return_value is None

    @pytest.mark.parametrize("function", [tasks.raise_value_error, tasks.araise_value_error])
    def test_failure(self, function: Any, settings: Any) -> None:
        once(settings)
        result = run(function.enqueue())
        assert result.status == TaskResultStatus.FAILED and result.is_finished
        (error,) = result.errors
        assert error.exception_class is ValueError
        assert error.exception_class_path == "builtins.ValueError"
        assert "Traceback" in error.traceback and "This task fails." in error.traceback
        assert function.func.__name__ in error.traceback
        with pytest.raises(ValueError, match="failed"):
            _ = result.return_value

    def test_failure_with_an_error_of_its_own_and_a_cause(self, settings: Any) -> None:
        once(settings)
        (error,) = run(tasks.raise_unusual.enqueue()).errors
        assert error.exception_class is tasks.Unusual
        assert "KeyError" in error.traceback and "direct cause" in error.traceback

    def test_error_class_that_is_gone_or_no_error(self, settings: Any) -> None:
        once(settings)
        (error,) = run(tasks.raise_unusual.enqueue()).errors
        for path, raises in (("no.such.Error", ImportError), ("datetime.datetime", ValueError)):
            with pytest.raises(raises):
                _ = dataclasses.replace(error, exception_class_path=path).exception_class

    def test_result_that_is_no_json_is_a_failure(self, settings: Any) -> None:
        once(settings)
        result = run(tasks.unstorable.enqueue())
        assert result.status == TaskResultStatus.FAILED and len(result.errors) == 1

    def test_interrupt_in_a_handler_is_its_failure_and_not_the_workers(self, settings: Any) -> None:
        once(settings)
        (error,) = run(tasks.raise_keyboard_interrupt.enqueue()).errors
        assert error.exception_class is KeyboardInterrupt

    def test_each_attempt_has_its_error_and_its_worker(self, settings: Any) -> None:
        options = {"max_attempts": 3, "backoff": 0}
        settings.TASKS = {"default": {"BACKEND": PATH, "QUEUES": [], "OPTIONS": options}}
        result = run(tasks.raise_value_error.enqueue(), name="the worker")
        assert result.attempts == len(result.errors) == 3
        assert result.worker_ids == ["the worker"] * 3
        assert result.last_attempted_at > result.started_at

    def test_context(self) -> None:
        result = run(tasks.tell_context.enqueue(word="hello"))
        assert result.return_value == {
            "attempt": 1,
            "id": result.id,
            "status": "RUNNING",
            "path": f"{tasks.__name__}.tell_context",
            "args": [],
            "word": "hello",
        }
        assert run(tasks.atell_context.enqueue()).return_value == 1

    def test_not_before_its_time(self) -> None:
        later = tasks.double.using(run_after=timezone.now() + HOUR).enqueue(1)
        assert run(tasks.double.enqueue(1)).is_finished
        assert backend().get_result(later.id).status == TaskResultStatus.READY

    def test_by_priority(self) -> None:
        results = [
            tasks.double.using(priority=priority).enqueue(1) for priority in (-10, 0, 10, -100, 100)
        ]
        with receiving(task_started) as started, running_worker(concurrency=1):
            for result in results:
                finished(result.id)
        order = [result.task.priority for _, result in started]
        assert sorted(order) == [-100, -10, 0, 10, 100] and order == sorted(order, reverse=True)


def once(settings: Any) -> None:
    settings.TASKS = {"default": {"BACKEND": PATH, "QUEUES": [], "OPTIONS": {"max_attempts": 1}}}


class TestResults:
    def test_by_id_from_the_task_and_from_the_backend(self) -> None:
        result = tasks.double.enqueue(21)
        assert tasks.double.get_result(result.id) == backend().get_result(result.id)
        assert tasks.double.get_result(result.id).id == result.id

    async def test_async(self) -> None:
        result = await tasks.double.aenqueue(21)
        assert (await tasks.double.aget_result(result.id)).args == [21]
        with pytest.raises(TaskResultMismatch):
            await tasks.adouble.aget_result(result.id)
        with pytest.raises(TaskResultDoesNotExist):
            await tasks.double.aget_result(str(new_job_id()))

    def test_changed_task_gets_it_too(self) -> None:
        result = tasks.double.using(priority=9).enqueue(21)
        assert tasks.double.get_result(result.id).task.priority == 9

    def test_of_another_task(self) -> None:
        result = tasks.double.enqueue(21)
        with pytest.raises(TaskResultMismatch):
            tasks.adouble.get_result(result.id)

    @pytest.mark.parametrize("id", ["", "123", "a" * 32, "JOB", "EVT0000000000000000000000000A"])
    def test_that_does_not_exist(self, id: str) -> None:
        for call in (tasks.double.get_result, backend().get_result):
            with pytest.raises(TaskResultDoesNotExist):
                call(id)

    def test_of_another_backend(self, settings: Any) -> None:
        """Two aliases may have one database, as the routers say: the result knows its own."""
        entry = {"BACKEND": PATH, "QUEUES": []}
        settings.TASKS = {"default": entry, "second": entry}
        result = tasks.double.using(backend="second").enqueue(1)
        for alias in ("default", "second"):
            found = task_backends[alias].get_result(result.id)
            assert found.backend == "second" and found.task.backend == "second"

    def test_refresh_takes_what_has_changed(self) -> None:
        result = tasks.double.enqueue(21)
        task_before = result.task
        run(result)
        assert result.status == TaskResultStatus.READY
        result.refresh()
        assert result.status == TaskResultStatus.SUCCESSFUL and result.return_value == 42
        assert result.finished_at and result.started_at and result.attempts == 1
        assert result.task is task_before

    async def test_arefresh(self) -> None:
        result = await tasks.double.aenqueue(21)
        await Job.objects.filter(pk=result.id).aupdate(state="running", attempt=1)
        await result.arefresh()
        assert result.status == TaskResultStatus.RUNNING

    async def test_refresh_of_one_that_is_gone(self) -> None:
        result = await tasks.double.aenqueue(21)
        await Job.objects.all().adelete()
        with pytest.raises(TaskResultDoesNotExist):
            await result.arefresh()


class TestSignals:
    def test_enqueued_within_the_transaction_with_the_result(self) -> None:
        with receiving(task_enqueued) as got, transaction.atomic():
            result = tasks.double.enqueue(21)
            ((sender, sent),) = got
        assert sender is EchoMQBackend
        assert (sent.id, sent.status, sent.args) == (result.id, TaskResultStatus.READY, [21])

    def test_not_for_a_task_that_was_refused(self) -> None:
        with receiving(task_enqueued) as got:
            with pytest.raises(InvalidPayload):
                tasks.double.enqueue(object())
        assert got == []

    @pytest.mark.parametrize("function", [tasks.double, tasks.adouble])
    def test_started_and_finished(self, function: Any) -> None:
        result = function.enqueue(21)
        with receiving(task_started) as started, receiving(task_finished) as ended:
            run(result)
        ((sender, begun),) = started
        assert sender is EchoMQBackend and begun.id == result.id
        assert begun.status == TaskResultStatus.RUNNING and begun.attempts == 1
        assert begun.started_at and not begun.finished_at
        ((sender, over),) = ended
        assert sender is EchoMQBackend and over.id == result.id
        assert over.status == TaskResultStatus.SUCCESSFUL and over.return_value == 42
        assert over.finished_at

    def test_finished_with_its_errors(self, settings: Any) -> None:
        once(settings)
        with receiving(task_finished) as ended:
            run(tasks.raise_value_error.enqueue())
        ((_, over),) = ended
        assert over.status == TaskResultStatus.FAILED
        assert over.errors[-1].exception_class is ValueError

    def test_loggers_of_django_name_the_task(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("DEBUG")
        result = run(tasks.double.enqueue(21))
        texts = [record.getMessage() for record in caplog.records if "task" in record.name]
        about = [text for text in texts if result.id in text and "Task id=" in text]
        assert len(about) == 3, about


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


class TestCopies:
    @pytest.fixture(params=[copy.copy, copy.deepcopy, pickled])
    def twin(self, request: pytest.FixtureRequest) -> Callable[[Any], Any]:
        made: Callable[[Any], Any] = request.param
        return made

    @pytest.mark.parametrize("one", tasks.ALL, ids=lambda one: one.name)
    def test_of_tasks(self, twin: Callable[[Any], Any], one: Any) -> None:
        other = twin(one)
        assert other == one and other.func is one.func and type(other) is type(one)

    def test_of_changed_tasks(self, twin: Callable[[Any], Any]) -> None:
        changed = tasks.double.using(priority=4, run_after=timezone.now() + HOUR)
        assert twin(changed) == changed

    def test_of_results(self, twin: Callable[[Any], Any], settings: Any) -> None:
        once(settings)
        for function in (tasks.double, tasks.raise_value_error):
            result = run(function.enqueue(*[2] * (function is tasks.double)))
            other = twin(result)
            assert other == result and other.errors == result.errors
            assert other.status == result.status and other.state == result.state
            if result.status == TaskResultStatus.SUCCESSFUL:
                assert other.return_value == 4

    def test_of_a_task_that_is_gone_by_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stored = pickle.dumps(tasks.double)
        for there in ("not a task", tasks.plain):
            monkeypatch.setattr(tasks, "double", there)
            with pytest.raises(ValueError, match=r"tasks_api_tasks\.double"):
                pickle.loads(stored)  # noqa: S301

    def test_tasks_can_be_keys(self) -> None:
        assert {tasks.double: 1}[tasks.double.using(priority=0)] == 1
