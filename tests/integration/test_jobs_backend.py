"""The TASKS backend: enqueue in the caller's transaction, and results."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from echomq_app.core.ids import new_job_id
from echomq_app.exceptions import InvalidPayload
from echomq_app.jobs.backend import EchoMQBackend
from echomq_app.jobs.tasks_api import (
    InvalidTask,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task,
    task_backends,
    task_enqueued,
)
from echomq_app.models import Job, Outbox, Record
from echomq_app.stream import Stream
from tests import jobtasks
from tests.integration.jobs import hearing, history, records

pytestmark = pytest.mark.django_db(transaction=True)


class Rollback(Exception):
    pass


def enqueue_and_roll_back() -> None:
    with transaction.atomic():
        jobtasks.add.enqueue(3, 4)
        raise Rollback


def nothing_was_written() -> bool:
    return not (Job.objects.exists() or Record.objects.exists() or Outbox.objects.exists())


class TestEnqueue:
    def test_writes_a_ready_job_and_its_record(self) -> None:
        result = jobtasks.add.using(priority=5).enqueue(1, b=2)
        assert result.id.startswith("JOB") and len(result.id) == 29
        job = Job.objects.get(pk=result.id)
        assert (job.queue, job.task_path, job.state) == ("default", "tests.jobtasks.add", "ready")
        assert job.arguments == {"args": [1], "kwargs": {"b": 2}}
        assert (job.priority, job.attempt, job.max_attempts, job.fence) == (5, 0, 3, 0)
        assert job.run_after == job.enqueued_at == result.enqueued_at
        ((event, data),) = records(result.id)
        assert event == "enqueued"
        assert data["id"] == result.id and data["state"] == "ready" and data["attempt"] == 0

    @pytest.mark.postgres
    def test_is_one_statement_outside_a_transaction(self) -> None:
        jobtasks.add.enqueue(0, 0)
        with CaptureQueriesContext(connection) as queries:
            jobtasks.add.enqueue(1, 2)
        assert len(queries) == 1, [query["sql"] for query in queries]

    def test_rollback_leaves_nothing_and_nobody_hears_of_it(self) -> None:
        with hearing() as heard:
            with pytest.raises(Rollback):
                enqueue_and_roll_back()
            assert nothing_was_written() and heard.so_far() == []

    def test_savepoint_rolled_back_takes_its_own_with_it(self) -> None:
        with hearing() as heard:
            with transaction.atomic():
                kept = jobtasks.add.enqueue(1, 2)
                with pytest.raises(Rollback):
                    enqueue_and_roll_back()
                assert heard.so_far() == []
            assert [str(event.job_id) for event in heard.so_far()] == [kept.id]
        assert history(kept.id) == ["enqueued"] and Record.objects.count() == 1

    def test_feed_hears_of_it_after_the_commit(self) -> None:
        with hearing() as heard:
            with transaction.atomic():
                result = jobtasks.add.enqueue(1, 2)
                assert heard.so_far() == []
            ((_, recorded),) = records(result.id)
            assert [(event.event, event.data) for event in heard.so_far()] == [
                ("enqueued", recorded)
            ]

    def test_delayed_job_is_scheduled_and_a_time_past_is_now(self) -> None:
        later = timezone.now() + dt.timedelta(hours=1)
        delayed = jobtasks.add.using(run_after=later).enqueue(1, 2)
        late = jobtasks.add.using(run_after=later - dt.timedelta(hours=2)).enqueue(1, 2)
        states = {job.pk: (job.state, job.run_after) for job in Job.objects.all()}
        assert states[Job.objects.get(pk=delayed.id).pk] == ("scheduled", later)
        state, run_after = states[Job.objects.get(pk=late.id).pk]
        assert state == "ready" and run_after > timezone.now() - dt.timedelta(minutes=1)

    async def test_async(self) -> None:
        result = await jobtasks.aadd.aenqueue(1, 2)
        again = await jobtasks.aadd.aget_result(result.id)
        assert again.status == TaskResultStatus.READY

    def test_five_thousand_in_one_transaction(self) -> None:
        with transaction.atomic():
            ids = [jobtasks.add.enqueue(n, n).id for n in range(5000)]
        assert Job.objects.count() == 5000 and ids == sorted(ids)
        stream = Stream("emq.default")
        while stream.relay():
            pass
        assert stream.info().write_cursor == 5000

    def test_ten_kilobytes_of_arguments(self) -> None:
        text = "é" * 5000
        result = jobtasks.echo.enqueue(text)
        assert Job.objects.get(pk=result.id).arguments["args"] == [text]

    @pytest.mark.parametrize(
        ("value", "says"),
        [
            ("a\0b", "NUL"),
            (float("nan"), "no JSON number"),
            ("\ud800", "lone surrogate"),
            ({1: 2}, "JSON keys are str"),
            ({"a": [object()]}, "type object"),
            (b"\xff", "bytes"),
            ("x" * 2_000_000, "the limit is"),
        ],
    )
    def test_arguments_that_are_no_json_are_refused_and_nothing_is_written(
        self, value: Any, says: str
    ) -> None:
        with pytest.raises(InvalidPayload, match=says):
            jobtasks.echo.enqueue(value)
        with pytest.raises(InvalidPayload, match=says):
            jobtasks.echo.enqueue(value=value)
        assert nothing_was_written()

    def test_refusal_leaves_the_callers_transaction_usable(self) -> None:
        with transaction.atomic():
            with pytest.raises(InvalidPayload):
                jobtasks.echo.enqueue(object())
            jobtasks.add.enqueue(1, 2)
        assert Job.objects.count() == 1

    @pytest.mark.postgres
    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    def test_works_in_a_transaction_of_a_higher_isolation(self, level: str) -> None:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            result = jobtasks.add.enqueue(1, 2)
        assert history(result.id) == ["enqueued"]

    def test_signal_has_the_backend_class_as_its_sender(self) -> None:
        got: list[tuple[Any, str]] = []

        def receive(sender: Any, task_result: Any, **kwargs: Any) -> None:
            got.append((sender, task_result.id))

        task_enqueued.connect(receive)
        try:
            result = jobtasks.add.enqueue(1, 2)
        finally:
            task_enqueued.disconnect(receive)
        assert got == [(EchoMQBackend, result.id)]


class TestTasks:
    @pytest.fixture
    def only_mail(self, settings: Any) -> None:
        backend = "echomq_app.jobs.backend.EchoMQBackend"
        settings.TASKS = {"default": {"BACKEND": backend, "QUEUES": ["default", "mail"]}}

    def test_unknown_queue_is_refused(self, only_mail: None) -> None:
        jobtasks.add.using(queue_name="mail").enqueue(1, 2)
        with pytest.raises(InvalidTask, match="sms"):
            jobtasks.add.using(queue_name="sms")

    @pytest.mark.parametrize("name", ["a queue", "mail.dead"])
    def test_queue_name_whose_stream_could_not_be_is_refused(self, name: str) -> None:
        with pytest.raises(InvalidTask, match="queue name"):
            jobtasks.add.using(queue_name=name)

    def test_options_of_the_backend_are_defaults_and_checked(self, settings: Any) -> None:
        backend = "echomq_app.jobs.backend.EchoMQBackend"
        options = {"max_attempts": 7, "backoff": 1}
        settings.TASKS = {"default": {"BACKEND": backend, "QUEUES": [], "OPTIONS": options}}
        plain = Job.objects.get(pk=jobtasks.add.enqueue(1, 2).id)
        assert (plain.max_attempts, plain.options) == (7, {"backoff": 1})
        declared = Job.objects.get(pk=jobtasks.fail.enqueue().id)
        assert (declared.max_attempts, declared.options) == (3, {"backoff": 0})

        wrong = {"default": {"BACKEND": backend, "QUEUES": [], "OPTIONS": {"max_attempt": 7}}}
        settings.TASKS = wrong
        (error,) = task_backends["default"].check()
        assert "max_attempt" in error.msg
        with pytest.raises(InvalidTask, match="max_attempt"):
            jobtasks.add.enqueue(1, 2)

    def test_second_backend_is_remembered(self, settings: Any) -> None:
        backend = {"BACKEND": "echomq_app.jobs.backend.EchoMQBackend", "QUEUES": []}
        settings.TASKS = {"default": backend, "other": backend}
        result = jobtasks.add.using(backend="other").enqueue(1, 2)
        assert result.backend == "other"
        assert Job.objects.get(pk=result.id).options == {"backend": "other"}


class TestResults:
    def test_of_each_state(self) -> None:
        mapped = {
            "ready": TaskResultStatus.READY,
            "scheduled": TaskResultStatus.READY,
            "running": TaskResultStatus.RUNNING,
            "completed": TaskResultStatus.SUCCESSFUL,
            "failed": TaskResultStatus.FAILED,
            "cancelled": TaskResultStatus.FAILED,
        }
        result: Any = jobtasks.add.enqueue(1, 2)
        for state, status in mapped.items():
            Job.objects.filter(pk=result.id).update(state=state, result=3, progress=0.5)
            result.refresh()
            assert (result.status, result.state, result.progress) == (status, state, 0.5)
        with pytest.raises(ValueError, match="failed"):
            _ = result.return_value

    def test_cancelled_is_failed_with_our_error_class(self) -> None:
        result: Any = jobtasks.add.enqueue(1, 2)
        Job.objects.filter(pk=result.id).update(state="cancelled", cancel_reason="enough")
        result.refresh()
        (error,) = result.errors
        assert error.exception_class_path == "echomq_app.exceptions.JobCancelled"
        assert error.exception_class.__name__ == "JobCancelled"
        assert result.cancel_reason == "enough" and result.is_finished

    def test_none_is_a_return_value(self) -> None:
        result = jobtasks.echo.enqueue(None)
        Job.objects.filter(pk=result.id).update(state="completed", result=None)
        assert jobtasks.echo.get_result(result.id).return_value is None

    @pytest.mark.parametrize("id", ["nonsense", "EVT0000000000000000000000000A", ""])
    def test_other_ids_have_no_result(self, id: str) -> None:
        with pytest.raises(TaskResultDoesNotExist):
            jobtasks.add.get_result(id)

    def test_unknown_id_has_no_result(self) -> None:
        with pytest.raises(TaskResultDoesNotExist):
            jobtasks.add.get_result(str(new_job_id()))

    @pytest.mark.parametrize(
        "path",
        [
            *("tests.jobtasks.gone", "no.such.module.f", "tests.jobtasks.not_a_task", "x"),
            "tests.script.task",
        ],
    )
    def test_of_a_task_that_is_gone(self, path: str) -> None:
        result = jobtasks.add.enqueue(1, 2)
        Job.objects.filter(pk=result.id).update(task_path=path)
        found = task_backends["default"].get_result(result.id)
        assert found.task.module_path in {path, f".{path}"}
        assert found.args == [1, 2]

    def test_of_a_queue_that_the_settings_no_longer_have(self, settings: Any) -> None:
        result = jobtasks.add.using(queue_name="old").enqueue(1, 2)
        backend = "echomq_app.jobs.backend.EchoMQBackend"
        settings.TASKS = {"default": {"BACKEND": backend, "QUEUES": ["default"]}}
        assert task_backends["default"].get_result(result.id).args == [1, 2]


class TestSiblings:
    """Django's own Immediate and Dummy backends, for tasks that use our options."""

    @pytest.fixture
    def backend(self, settings: Any, request: pytest.FixtureRequest) -> None:
        settings.TASKS = {"default": {"BACKEND": request.param, "QUEUES": []}}

    @pytest.mark.parametrize(
        "backend", ["echomq_app.jobs.backend.EchoMQImmediateBackend"], indirect=True
    )
    def test_immediate_gives_a_job_context(self, backend: None, tmp_path: Any) -> None:
        noted = task(takes_context=True)(jobtasks.note.func)
        result = noted.enqueue(str(tmp_path / "trace"))
        assert result.status == TaskResultStatus.SUCCESSFUL and result.return_value == 1
        assert jobtasks.marks(tmp_path / "trace")[0].startswith("JOB")
