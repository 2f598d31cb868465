"""Who asked a job to stop: the handler, the record and the row are told the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echomq_app import cancel
from echomq_app.exceptions import JobCancelled
from echomq_app.jobs import control
from echomq_app.jobs.outcomes import Ending
from echomq_app.jobs.running import Asked, RunningJob
from echomq_app.jobs.transitions import settle
from echomq_app.jobs.worker import Worker
from echomq_app.models import Job
from tests import jobtasks
from tests.integration.jobs import (
    USING,
    claim,
    finished,
    outcome,
    records,
    register,
    running_worker,
)
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def last(id: str) -> tuple[str, Any, Any]:
    type, data = records(id)[-1]
    return type, data["reason"], data.get("kind")


@pytest.mark.parametrize("kind", ["user", "admin"])
def test_a_cancel_reaches_the_handler_the_record_and_the_row(kind: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with running_worker():
        job = jobtasks.marks_the_kind.enqueue(str(trace))
        wait_until(trace.exists)
        control.cancel(job.id, "enough", kind)
        row = finished(job.id)
    assert trace.read_text().splitlines() == ["start", f"{kind} {kind} enough"]
    assert (row.state, row.cancel_reason, row.cancel_kind) == ("cancelled", "enough", kind)
    assert last(job.id) == ("cancelled", "enough", kind)


def test_a_timeout_is_told_to_the_handler(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    task: Any = jobtasks.marks_the_kind
    with running_worker():
        job = task.using(timeout=0.2, max_attempts=1).enqueue(str(trace))
        row = finished(job.id)
    assert trace.read_text().splitlines()[1].startswith("timeout timeout deadline")
    assert (row.state, row.cancel_kind) == ("failed", "")


def test_a_shutdown_is_told_to_the_handler_and_cancels_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with running_worker():
        job = jobtasks.marks_the_kind.enqueue(str(trace))
        wait_until(trace.exists)
    assert trace.read_text().splitlines()[1] == "shutdown shutdown shutdown"
    row = Job.objects.get(pk=job.id)
    assert (row.state, row.cancel_kind) == ("ready", "")


def cancelled_while_it_stops(worker: Worker, trace: Path) -> Any:
    """Cancel a job whose handler holds on though it has heard of the shutdown; return it."""
    job = jobtasks.holds_on.enqueue(str(trace))
    wait_until(trace.exists)
    worker.stop()
    wait_until(lambda: "seen" in trace.read_text())
    assert control.cancel(job.id, "enough") == "requested"
    return job


def test_a_cancel_while_the_worker_stops(tmp_path: Path) -> None:
    """The handler has heard of the shutdown before: what is written says who wanted its end."""
    trace = tmp_path / "trace"
    with running_worker(grace=20.0, concurrency=1) as worker:
        job = cancelled_while_it_stops(worker, trace)
        (tmp_path / "trace.go").touch()
        row = finished(job.id)
    assert (row.state, row.attempt, row.cancel_reason, row.cancel_kind) == (
        *("cancelled", 1),
        *("enough", "user"),
    )
    assert last(job.id) == ("cancelled", "enough", "user")


def test_a_cancel_while_the_worker_stops_of_a_job_that_it_hands_back(tmp_path: Path) -> None:
    """It may still run there, so it isn't cancelled; and it is never begun again."""
    trace = tmp_path / "trace"
    with running_worker(grace=1.0, concurrency=1) as worker:
        job = cancelled_while_it_stops(worker, trace)
        wait_until(lambda: Job.objects.get(pk=job.id).state == "ready")
    (tmp_path / "trace.go").touch()
    with running_worker():
        row = finished(job.id)
    assert (row.state, row.attempt, row.cancel_reason) == ("cancelled", 0, "enough")
    assert trace.read_text().count("start") == 1


def test_a_lost_lease_is_told_to_the_handler() -> None:
    jobtasks.add.enqueue(1, 2)
    (claimed,) = claim(register())
    job = RunningJob(claimed)
    job.ask(Asked.LEASE_LOST, Asked.LEASE_LOST.value)
    job.ask(Asked.CANCEL, "too late", "admin")
    assert (job.token.kind, job.token.reason) == ("lease_lost", "lease_lost")


def test_a_job_that_waits() -> None:
    first, second = jobtasks.add.enqueue(1, 2), jobtasks.add.enqueue(1, 2)
    control.cancel(first.id, "no", "admin")
    assert Job.objects.get(pk=first.id).cancel_kind == "admin"
    assert last(first.id) == ("cancelled", "no", "admin")
    (claimed,) = claim(register())
    control.cancel(second.id, "first", "deploy")
    settle(USING, [outcome(claimed, Ending.HANDED_BACK, reason="shutdown")])
    control.cancel(second.id, "second", "user")
    assert last(second.id) == ("cancelled", "first", "deploy")


@pytest.mark.parametrize(
    ("ending", "state"), [(Ending.RETURNED, "completed"), (Ending.RAISED, "failed")]
)
def test_a_handler_that_did_not_stop(ending: Ending, state: str) -> None:
    job = jobtasks.add.enqueue(1, 2)
    (claimed,) = claim(register())
    control.cancel(job.id, "no", "admin")
    error = {"class": "E", "message": ""} if ending is Ending.RAISED else None
    settle(USING, [outcome(claimed, ending, error=error)])
    row = Job.objects.get(pk=job.id)
    assert (row.state, row.cancel_kind) == (state, "admin")
    assert last(job.id) == (state, "no", "admin")


def test_retry_forgets_the_kind() -> None:
    job = jobtasks.add.enqueue(1, 2)
    control.cancel(job.id, "no", "admin")
    control.retry(job.id)
    assert Job.objects.get(pk=job.id).cancel_kind == ""


class TestToken:
    def test_a_deadline_has_its_kind(self) -> None:
        token = cancel.new().with_deadline(0)
        assert token.kind == "deadline"
        token = cancel.new().with_deadline(0.01)
        assert token.wait(30) and token.kind == "deadline"

    def test_the_first_kind_stays_and_children_have_it(self) -> None:
        token = cancel.new()
        before, other = token.child(), cancel.new()
        assert token.kind is None
        cancel.cancel(token, "a", "shutdown")
        token.cancel("b")
        other.cancel()
        kinds = [one.kind for one in (token, before, token.child(), other)]
        assert kinds == ["shutdown", "shutdown", "shutdown", "user"]
        assert cancel.check(token) == cancel.Cancelled("a", "shutdown")
        for check in (token.raise_if_cancelled, lambda: cancel.check_or_raise(token)):
            with pytest.raises(JobCancelled) as caught:
                check()
            assert (caught.value.reason, caught.value.kind) == ("a", "shutdown")


def test_a_result_has_the_kind() -> None:
    def kinds(result: Any) -> tuple[Any, Any]:
        result.refresh()
        read: Any = jobtasks.add.get_result(result.id)
        assert read.cancel_reason == result.cancel_reason
        return read.cancel_kind, result.cancel_kind

    result = jobtasks.add.enqueue(1, 2)
    assert kinds(result) == (None, None)
    control.cancel(result.id, "no", "admin")
    assert kinds(result) == ("admin", "admin")
    control.retry(result.id)
    assert kinds(result) == (None, None)
