"""Each end of a job is announced once, after its commit: `task_finished`, and the log line."""

from __future__ import annotations

import contextlib
import copy
import datetime as dt
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models import Q
from django.test import TestCase
from django.utils import timezone

from echomq_app.core.ids import JobId
from echomq_app.jobs import control
from echomq_app.jobs.announcing import announcer
from echomq_app.jobs.backend import EchoMQBackend
from echomq_app.jobs.completer import Completer
from echomq_app.jobs.connections import in_service_thread
from echomq_app.jobs.housekeeping import rescue, sweep
from echomq_app.jobs.outcomes import Ending
from echomq_app.jobs.tasks_api import TaskResultStatus, task_finished
from echomq_app.jobs.transitions import settle
from echomq_app.models import CancelRequest, Job, Worker
from echomq_app.testing import run_jobs
from tests import jobtasks, processtasks
from tests.integration.jobs import USING, claim, finished, outcome, register, running_worker
from tests.jobtasks import marks
from tests.wait import wait_until

JOBS = "echomq_app.exceptions."


class Heard(list[Any]):
    """Copies of the results that receivers of `task_finished` got, and who sent them."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[str] = []
        """What the database said meanwhile."""
        self.senders: list[Any] = []

    def receive(self, sender: Any, task_result: Any, **kwargs: Any) -> None:
        self.append(copy.copy(task_result))
        self.senders.append(sender)
        self.states.append(Job.objects.get(pk=task_result.id).state)


@pytest.fixture
def heard() -> Iterator[Heard]:
    found = Heard()
    task_finished.connect(found.receive)
    try:
        yield found
    finally:
        task_finished.disconnect(found.receive)


def worked(id: str, **options: Any) -> None:
    """Let a worker bring a job to its end."""
    with running_worker(lease=30.0, **options):
        finished(id, 60)


def by_worker(enqueue: Callable[[str], Any]) -> Callable[[str], str]:
    def end(trace: str) -> str:
        id = str(enqueue(trace).id)
        worked(id)
        return id

    return end


def gone(change: dict[str, Any]) -> Callable[[str], str]:
    """Have a worker end a job whose row says something odd."""

    def end(trace: str) -> str:
        id = jobtasks.add.enqueue(1, 2).id
        Job.objects.filter(pk=id).update(max_attempts=1, **change)
        worked(id)
        return str(id)

    return end


def cancelled_while(then: str) -> Callable[[str], str]:
    def end(trace: str) -> str:
        id = jobtasks.until_cancelled.enqueue(trace, then).id
        with running_worker(lease=30.0):
            wait_until(lambda: marks(trace))
            control.cancel(id, "enough")
            finished(id)
        return str(id)

    return end


def waiting(cancel: Callable[[str], object], **using: Any) -> Callable[[str], str]:
    def end(trace: str) -> str:
        id = jobtasks.add.using(**using).enqueue(1, 2).id
        cancel(id)
        return str(id)

    return end


def lost(*, asked: bool = False) -> Callable[[str], str]:
    """Have a job's only attempt taken from a worker whose lease is over."""

    def end(trace: str) -> str:
        id = jobtasks.add.enqueue(1, 2).id
        Job.objects.filter(pk=id).update(max_attempts=1)
        worker = register()
        claim(worker)
        if asked:
            control.cancel(id, "enough")
        past = timezone.now() - dt.timedelta(seconds=1)
        Worker.objects.filter(pk=worker.pk).update(expires_at=past)
        assert rescue(USING) == 1
        return str(id)

    return end


def swept(trace: str) -> str:
    """Cancel a job in the moment in which it goes back to the queue."""
    id = jobtasks.add.enqueue(1, 2).id
    claim(register())
    control.cancel(id, "enough")
    Job.objects.filter(pk=id).update(state="ready", worker=None)
    sweep(USING)
    return str(id)


def not_storable(trace: str) -> str:
    """Bring an outcome to the database that it refuses."""
    id = jobtasks.add.enqueue(1, 2).id
    (claimed,) = claim(register())
    completer = Completer(USING, patience=30, on_ready=bool, on_written=bool)
    completer.start()
    broken = "1e999999" if connection.vendor == "postgresql" else "{"
    completer.put(outcome(claimed, result=broken))
    assert completer.close(timeout=20)
    return str(id)


def inline(enqueue: Callable[[str], Any]) -> Callable[[str], str]:
    def end(trace: str) -> str:
        id = enqueue(trace).id
        run_jobs()
        return str(id)

    return end


def cancel_in_a_transaction(id: str) -> None:
    with transaction.atomic():
        control.cancel(id, "enough")
        control.cancel(id, "again")


TOMORROW = {"run_after": timezone.now() + dt.timedelta(days=1)}

ENDS: dict[str, tuple[Callable[[str], str], str, str]] = {
    "returns": (by_worker(lambda trace: jobtasks.add.enqueue(1, 2)), "completed", ""),
    "returns, async": (by_worker(lambda trace: jobtasks.aadd.enqueue(1, 2)), "completed", ""),
    "returns, in a process": (by_worker(lambda trace: processtasks.pid.enqueue()), "completed", ""),
    "returns, after failures": (
        by_worker(lambda trace: jobtasks.fail_until.enqueue(3, trace)),
        "completed",
        "",
    ),
    "raises three times": (
        by_worker(lambda trace: jobtasks.fail.enqueue("no")),
        "failed",
        "builtins.ValueError",
    ),
    "raises, in a process": (
        by_worker(lambda trace: processtasks.raises.enqueue()),
        "failed",
        "tests.processtasks.CannotBeRebuilt",
    ),
    "exits": (
        by_worker(lambda trace: processtasks.exits.enqueue()),
        "failed",
        "builtins.SystemExit",
    ),
    "returns what can't be stored": (
        by_worker(lambda trace: jobtasks.returns.enqueue("a date", trace)),
        "failed",
        f"{JOBS}InvalidResult",
    ),
    "returns what the database refuses": (not_storable, "failed", ""),
    "times out": (
        by_worker(lambda trace: jobtasks.times_out.enqueue()),
        "failed",
        "builtins.TimeoutError",
    ),
    "stops by itself": (
        by_worker(lambda trace: jobtasks.stops_by_itself.enqueue()),
        "cancelled",
        f"{JOBS}JobCancelled",
    ),
    "dies with its process": (
        by_worker(lambda trace: processtasks.dies.enqueue(trace, "kill")),
        "failed",
        f"{JOBS}ProcessLost",
    ),
    "module that is gone": (
        gone({"task_path": "no.such.task"}),
        "failed",
        "builtins.ModuleNotFoundError",
    ),
    "task that is none": (
        gone({"task_path": "tests.jobtasks.not_a_task"}),
        "failed",
        f"{JOBS}UnknownTask",
    ),
    "arguments that are none": (gone({"arguments": []}), "failed", "builtins.TypeError"),
    "options that nobody can read": (gone({"options": [1]}), "failed", "builtins.AttributeError"),
    "backend that is gone": (gone({"options": {"backend": "gone"}}), "completed", ""),
    "stops when asked": (cancelled_while("stop"), "cancelled", f"{JOBS}JobCancelled"),
    "returns when asked": (cancelled_while("return"), "completed", ""),
    "raises when asked": (cancelled_while("raise"), "failed", "builtins.ValueError"),
    "cancelled while ready": (waiting(control.cancel), "cancelled", f"{JOBS}JobCancelled"),
    "cancelled while scheduled": (
        waiting(control.cancel, **TOMORROW),
        "cancelled",
        f"{JOBS}JobCancelled",
    ),
    "cancelled twice in a transaction": (
        waiting(cancel_in_a_transaction),
        "cancelled",
        f"{JOBS}JobCancelled",
    ),
    "cancelled with many": (
        waiting(lambda _: control.cancel_many(Q())),
        "cancelled",
        f"{JOBS}JobCancelled",
    ),
    "cancelled while it was handed back": (swept, "cancelled", f"{JOBS}JobCancelled"),
    "worker lost": (lost(), "failed", f"{JOBS}WorkerLost"),
    "worker lost after a cancel": (lost(asked=True), "cancelled", f"{JOBS}JobCancelled"),
    "run_jobs, returns": (inline(lambda trace: jobtasks.add.enqueue(1, 2)), "completed", ""),
    "run_jobs, raises": (
        inline(lambda trace: jobtasks.fail.enqueue()),
        "failed",
        "builtins.ValueError",
    ),
}


@pytest.mark.django_db(transaction=True)
class TestEveryEnd:
    @pytest.mark.parametrize("how", ENDS)
    def test_is_announced_once_after_its_commit_and_logged(
        self, how: str, heard: Heard, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        caplog.set_level("INFO")
        end, state, error = ENDS[how]
        id = end(str(tmp_path / "trace"))
        announcer.close(20)
        (result,) = heard
        row: Any = EchoMQBackend("default", {"QUEUES": []}).get_result(id)
        assert (result.id, result.state, heard.states) == (id, state, [state])
        assert heard.senders == [EchoMQBackend]
        names = ("status", "errors", "finished_at", "cancel_reason", "cancel_kind", "args")
        for name in (*names, "_return_value", "worker_ids", "attempts", "started_at"):
            assert getattr(result, name) == getattr(row, name), name
        good = state == "completed"
        assert result.status == (TaskResultStatus.SUCCESSFUL if good else TaskResultStatus.FAILED)
        if error:
            assert result.errors[-1].exception_class_path == error
        about = [record for record in caplog.records if id in record.getMessage()]
        (line,) = [
            record
            for record in about
            if record.name.startswith("django") and "RUNNING" not in record.getMessage()
        ]
        wanted = logging.ERROR if state == "failed" else logging.INFO
        assert line.levelno == wanted and line.levelname == logging.getLevelName(wanted)
        assert bool(line.exc_info) is (state == "failed")
        if error and state == "failed":
            assert error.rpartition(".")[2] in (caplog.handler.format(line))
        if state != "failed":
            assert [record for record in about if record.levelno > logging.WARNING] == []


@pytest.mark.django_db(transaction=True)
class TestWhatIsNoEnd:
    def test_rolled_back(self, heard: Heard) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        with transaction.atomic():
            control.cancel(id)
            transaction.set_rollback(True)
        assert heard == []

    def test_only_after_the_commit(self, heard: Heard) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        with transaction.atomic():
            control.cancel(id)
            assert heard == []
        assert [result.id for result in heard] == [id]

    def test_the_outcome_of_a_worker_that_lost_the_job(self, heard: Heard) -> None:
        """The handler runs to its end beside its successor; one of both is announced."""
        id = jobtasks.add.enqueue(1, 2).id
        worker = register()
        (first,) = claim(worker)
        settle(USING, [outcome(first, Ending.HANDED_BACK)])
        (second,) = claim(worker)
        assert len(settle(USING, [outcome(first)]).lost) == 1
        assert heard == []
        settle(USING, [outcome(second)])
        assert len(settle(USING, [outcome(second)]).lost) == 1
        assert [result.id for result in heard] == [id]

    def test_requests_retries_duplicates_and_deletions(self, heard: Heard) -> None:
        id = jobtasks.once_per_arguments.enqueue(1).id
        assert jobtasks.once_per_arguments.enqueue(1).duplicate
        (claimed,) = claim(register())
        assert control.cancel(id) == "requested"
        settle(USING, [outcome(claimed, Ending.RAISED)])
        assert len(heard) == 1
        control.retry(id)
        Job.objects.all().delete()
        CancelRequest.objects.all().delete()
        assert len(heard) == 1

    def test_each_end_of_a_job_that_is_retried_is_one(self, heard: Heard) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        control.cancel(id)
        control.retry(id)
        worked(id)
        assert [result.state for result in heard] == ["cancelled", "completed"]


@contextlib.contextmanager
def receiving(receive: Callable[..., Any]) -> Iterator[None]:
    task_finished.connect(receive)
    try:
        yield
    finally:
        task_finished.disconnect(receive)


@pytest.mark.django_db(transaction=True)
class TestReceivers:
    def test_that_raise_stop_neither_the_worker_nor_other_receivers(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        got: list[str] = []

        def broken(**kwargs: Any) -> None:
            raise RuntimeError("a broken receiver")

        def good(task_result: Any, **kwargs: Any) -> None:
            got.append(task_result.id)

        ids = [jobtasks.add.enqueue(n, n).id for n in range(5)]
        with receiving(broken), receiving(good):
            with running_worker():
                for id in ids:
                    finished(id)
            other = jobtasks.add.enqueue(1, 2).id
            control.cancel(other)
        assert sorted(got) == sorted([*ids, other])
        assert caplog.text.count("event=receiver_failed") == 6

    def test_never_run_in_a_service_thread(self) -> None:
        """They would write on the worker's own connection, and hold up what it does."""
        found: list[bool] = []

        def receive(**kwargs: Any) -> None:
            found.append(in_service_thread())

        id = jobtasks.add.enqueue(1, 2).id
        with receiving(receive):
            worked(id)
        assert found == [False]

    def test_may_use_the_database_and_leave_it_as_they_like(self) -> None:
        def leave(task_result: Any, **kwargs: Any) -> None:
            transaction.atomic().__enter__()
            Job.objects.filter(pk=task_result.id).update(priority=99)

        ids = [jobtasks.add.enqueue(n, n).id for n in range(3)]
        with receiving(leave), running_worker(concurrency=1):
            for id in ids:
                finished(id)
        assert set(Job.objects.values_list("priority", "state")) == {(0, "completed")}

    def test_that_are_slow_hold_up_claims_and_the_end_of_no_job(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("echomq_app.jobs.announcing.BACKLOG", 1)
        go, got = threading.Event(), []

        def slow(task_result: Any, **kwargs: Any) -> None:
            got.append(task_result.id)
            go.wait(60)

        ids = [jobtasks.add.enqueue(n, n).id for n in range(2)]
        with receiving(slow), running_worker() as worker:
            for id in ids:
                assert finished(id).state == "completed"
            wait_until(lambda: announcer.is_behind)
            late = jobtasks.add.enqueue(1, 2).id
            assert worker._claim() == (0, 0) and Job.objects.get(pk=late).state == "ready"
            go.set()
            finished(late)
        assert sorted(got) == sorted([*ids, late])  # also those of the worker's last moment

    def test_that_cancel_other_jobs(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")
        first, second = [jobtasks.add.enqueue(n, n).id for n in range(2)]

        def cancel_another(task_result: Any, **kwargs: Any) -> None:
            if task_result.id == first:
                control.cancel(second)

        with receiving(cancel_another):
            control.cancel(first)
        lines = [record for record in caplog.records if "state=FAILED" in record.getMessage()]
        assert [record.levelname for record in lines] == ["INFO", "INFO"]

    def test_async_ones(self) -> None:
        got: list[str] = []

        async def receive(task_result: Any, **kwargs: Any) -> None:
            got.append(task_result.id)

        id = jobtasks.aadd.enqueue(1, 2).id
        with receiving(receive):
            worked(id)
        assert got == [id]


class TestInATestCase(TestCase):
    def test_cancel_is_announced_when_the_callbacks_run(self) -> None:
        got: list[str] = []

        def receive(task_result: Any, **kwargs: Any) -> None:
            got.append(task_result.id)

        with receiving(receive):
            id = jobtasks.add.enqueue(1, 2).id
            with self.captureOnCommitCallbacks(execute=True):
                control.cancel(id)
            assert got == [str(JobId.parse(id))]
        assert connections[USING].in_atomic_block
