"""Workers as users run them: processes that get signals, are killed, and lose their lease."""

from __future__ import annotations

import datetime as dt
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import OperationalError
from django.db.models import F
from django.utils import timezone

from echomq_app.jobs import control
from echomq_app.jobs.bulk import call, enqueue_many
from echomq_app.models import CancelRequest, Job, Worker
from echomq_app.stream import Stream
from project.children import Child
from tests import jobtasks
from tests.acceptance.workers import (
    StartWorker,
    job,
    press_until_it_ends,
    starting_workers,
    wait_for_state,
)
from tests.jobtasks import marks
from tests.wait import wait_until


@pytest.fixture
def start_worker(subprocess_env: dict[str, str]) -> Iterator[StartWorker]:
    with starting_workers(subprocess_env) as start:
        yield start


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(tmp_path / "trace")


def history(job_id: str, queue: str = "default") -> list[str]:
    """Name what the log says about a job, in order."""
    return [record.type for record in Stream(f"emq.{queue}").read(key=job_id).records]


def wait_for_mark(trace: str, line: str) -> None:
    wait_until(lambda: line in marks(trace), 20, f"the handler marks {line!r}")


class TestSignals:
    def test_sigterm_asks_the_handler_and_hands_its_job_back_with_the_attempt_restored(
        self, start_worker: StartWorker, trace: str
    ) -> None:
        worker = start_worker("--queue", "default")
        id = jobtasks.until_cancelled.enqueue(trace).id
        wait_for_mark(trace, "start 1")
        fence = job(id).fence
        worker.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert "cancelled shutdown" in marks(trace)
        left = job(id)
        assert (left.state, left.attempt, left.fence, left.worker_id) == ("ready", 0, fence, None)
        assert history(id) == ["enqueued", "started", "retrying"]
        assert Worker.objects.get().stopped_at is not None

    def test_handler_that_ignores_sigterm_is_left_behind_after_the_grace(
        self, start_worker: StartWorker, trace: str
    ) -> None:
        worker = start_worker("--queue", "default", "--grace", "0.3")
        id = jobtasks.until_cancelled.enqueue(trace, then="stay").id
        wait_for_mark(trace, "start 1")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
        left = job(id)
        assert (left.state, left.attempt) == ("ready", 0)

    def test_repeated_signals_are_one_stop(self, start_worker: StartWorker, trace: str) -> None:
        worker = start_worker("--queue", "default", "--grace", "2")
        id = jobtasks.until_cancelled.enqueue(trace, then="stay").id
        wait_for_mark(trace, "start 1")
        worker.send_signal(signal.SIGTERM)
        wait_for_mark(trace, "cancelled shutdown")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            os.killpg(worker.pid, number)
        assert worker.wait() == 0
        left = job(id)
        assert (left.state, left.attempt) == ("ready", 0)
        assert Worker.objects.get().stopped_at is not None

    def test_ctrl_c_again_ends_it_at_once_and_another_worker_takes_the_job(
        self, start_worker: StartWorker, trace: str
    ) -> None:
        worker = start_worker("--queue", "default", "--grace", "60")
        id = jobtasks.until_cancelled.enqueue(trace, then="stay").id
        wait_for_mark(trace, "start 1")
        press_until_it_ends(worker)
        assert worker.wait() == -signal.SIGINT
        assert job(id).state == "running"
        second = start_worker("--queue", "default")
        wait_for_mark(trace, "start 2")
        second.kill()

    def test_sigquit_ends_it_at_once(self, start_worker: StartWorker, trace: str) -> None:
        worker = start_worker("--queue", "default", "--grace", "60")
        id = jobtasks.until_cancelled.enqueue(trace).id
        wait_for_mark(trace, "start 1")
        worker.send_signal(signal.SIGQUIT)
        assert worker.wait() == -signal.SIGQUIT
        assert job(id).state == "running"

    def test_jobs_that_return_within_the_grace_are_completed(
        self, start_worker: StartWorker, trace: str
    ) -> None:
        worker = start_worker("--queue", "default", "--grace", "20")
        id = jobtasks.until_cancelled.enqueue(trace, then="return").id
        wait_for_mark(trace, "start 1")
        worker.send_signal(signal.SIGINT)
        assert worker.wait() == 0
        assert (job(id).state, job(id).result) == ("completed", "ignored it")

    def test_failure_to_start_says_why_in_one_line_and_exits_3(
        self, start_worker: StartWorker
    ) -> None:
        broken = {"ECHOMQ_TEST_FOLDER": "/nowhere"}  # where the database isn't
        worker = start_worker("--queue", "default", ready=False, extra=broken)
        assert worker.wait() == 3
        assert "can't use the database" in worker.output
        assert "Traceback" not in worker.output

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (("--queue", "a queue"), "queue name"),
            (("--lease", "1", "--heartbeat", "0.5"), "three heartbeats"),
            (("--concurrency", "0"), "concurrency"),
            (("--grace", "soon"), "number of seconds"),
        ],
    )
    def test_usage_errors_exit_2(
        self, start_worker: StartWorker, options: tuple[str, ...], says: str
    ) -> None:
        worker = start_worker("--queue", "default", *options, ready=False)
        assert worker.wait() == 2
        assert says in worker.output
        assert "Traceback" not in worker.output


def stopped_between_writes(worker: Child) -> bool:
    """Stop it, unless that is where it holds SQLite's write lock: then nobody could work."""
    worker.send_signal(signal.SIGSTOP)
    try:
        Worker.objects.filter(name="nobody").update(pid=0)
    except OperationalError:
        worker.send_signal(signal.SIGCONT)
        return False
    return True


class TestKilled:
    def test_sigkill_in_the_middle_of_a_job_another_worker_finishes_it(
        self, start_worker: StartWorker, trace: str
    ) -> None:
        first = start_worker("--queue", "default")
        id = jobtasks.fail_until.enqueue(2, trace)
        long = jobtasks.until_cancelled.enqueue(trace)
        wait_for_mark(trace, "start 1")
        first.kill()
        start_worker("--queue", "default")
        wait_for_mark(trace, "start 2")
        assert control.cancel(long.id, "enough") == "requested"
        done = wait_for_state(long.id, "cancelled")
        assert done.attempt == 2
        assert done.errors[0]["class"] == "echomq_app.exceptions.WorkerLost"
        wait_until(lambda: history(long.id)[-1] == "cancelled")
        assert history(long.id) == [
            "enqueued",
            "started",
            "stalled",
            "retrying",
            "started",
            "cancel_requested",
            "cancelled",
        ]
        wait_for_state(id.id, "completed")

    def test_handler_that_exits_the_process_is_failed_after_max_attempts(
        self, start_worker: StartWorker, trace: str
    ) -> None:
        id = jobtasks.exit_hard.enqueue(trace).id
        for _ in range(3):
            worker = start_worker("--queue", "default", ready=False)
            assert worker.wait() == 1
        start_worker("--queue", "default")
        failed = wait_for_state(id, "failed")
        assert len(marks(trace)) == 3 and failed.attempt == 3
        assert [error["attempt"] for error in failed.errors] == [1, 2, 3]
        wait_until(lambda: history(id)[-1] == "failed")

    @pytest.mark.parametrize("concurrency", ["1", "10"])
    def test_a_job_that_kills_its_worker_costs_no_other_job_its_only_attempt(
        self, start_worker: StartWorker, trace: str, concurrency: str
    ) -> None:
        """Others wait in the worker then; and what has ended just before is written."""
        once = jobtasks.noop.using(max_attempts=1)
        enqueue_many(once, [call(n) for n in range(600)])
        killer = jobtasks.kill_the_process.using(max_attempts=1).enqueue(trace).id
        enqueue_many(once, [call(n) for n in range(600)])
        options = ("--queue", "default", "--concurrency", concurrency, "--lease", "3")
        worker = start_worker(*options, ready=False)
        assert worker.wait(60) == -signal.SIGKILL
        waited = Job.objects.filter(state="running").exclude(begun_fence=F("fence"))
        came_back = list(waited.values_list("pk", flat=True))
        assert came_back
        start_worker(*options)
        wait_for_state(killer, "failed")
        wait_until(lambda: not Job.objects.filter(finished_at=None).exists(), 60)
        failed = Job.objects.filter(state="failed")
        # At the same moment so many handlers may run beside it.
        assert 1 <= failed.count() <= int(concurrency)
        assert Job.objects.filter(state="completed").count() == 1_201 - failed.count()
        assert set(Job.objects.values_list("attempt", flat=True)) == {1}
        assert marks(trace) == ["killed"]
        told = ["enqueued", "started", "completed"]
        wait_until(lambda: all(history(str(id)) == told for id in came_back[:3]))

    def test_stopped_worker_that_goes_on_after_its_lease_drops_its_late_write(
        self, start_worker: StartWorker, trace: str
    ) -> None:
        first = start_worker("--queue", "default", "--name", "first")
        id = jobtasks.until_cancelled.enqueue(trace, then="return").id
        wait_for_mark(trace, "start 1")
        wait_until(lambda: stopped_between_writes(first))
        start_worker("--queue", "default", "--name", "second")
        wait_for_mark(trace, "start 2")
        first.send_signal(signal.SIGCONT)
        wait_for_mark(trace, "cancelled lease_lost")
        first.wait_for_output("outcome_dropped")
        assert job(id).state == "running" and job(id).worker_name == "second"
        # It has a new lease and works on.
        other = jobtasks.add.enqueue(1, 2).id
        wait_for_state(other, "completed")
        assert Worker.objects.filter(name="first", lost_at=None).count() == 1


class TestLease:
    """Lease 2 s: what keeps a thread or the interpreter busy doesn't cost the job."""

    def test_busy_handlers_run_once(self, start_worker: StartWorker, tmp_path: Path) -> None:
        start_worker("--queue", "default")
        start_worker("--queue", "default")
        names = ("block_the_loop", "spin", "sleep")
        traces = [str(tmp_path / name) for name in names]
        ids = [
            getattr(jobtasks, name).enqueue(6, trace=trace).id
            for name, trace in zip(names, traces, strict=True)
        ]
        for id, trace in zip(ids, traces, strict=True):
            done = wait_for_state(id, "completed")
            assert done.attempt == 1 and done.fence == 1
            assert marks(trace) == ["start"]
        assert not Worker.objects.exclude(lost_at=None).exists()


class TestCancel:
    def test_reaches_a_running_handler_in_another_process(
        self, start_worker: StartWorker, trace: str
    ) -> None:
        id = jobtasks.until_cancelled.enqueue(trace).id
        start_worker("--queue", "default", "--concurrency", "1", "--poll", "60")
        wait_for_mark(trace, "start 1")
        asked = time.monotonic()
        assert control.cancel(id, "the user closed the page") == "requested"
        wait_for_mark(trace, "cancelled the user closed the page")
        assert time.monotonic() - asked < 5  # far from the poll interval
        done = wait_for_state(id, "cancelled")
        assert (done.cancel_reason, done.attempt) == ("the user closed the page", 1)
        assert not CancelRequest.objects.exists()
        assert len([line for line in marks(trace) if line.startswith("start")]) == 1

    def test_async_handler_too(self, start_worker: StartWorker, trace: str) -> None:
        start_worker("--queue", "default")
        id = jobtasks.until_cancelled_async.enqueue(trace).id
        wait_for_mark(trace, "start 1")
        assert control.cancel(id, "not needed") == "requested"
        assert wait_for_state(id, "cancelled").cancel_reason == "not needed"
        assert marks(trace) == ["start 1", "cancelled not needed"]

    def test_of_a_delayed_job_holds_when_all_workers_were_restarted(
        self, start_worker: StartWorker, trace: str
    ) -> None:
        first = start_worker("--queue", "default")
        due = timezone.now() + dt.timedelta(seconds=2)
        id = jobtasks.note.using(run_after=due).enqueue(trace).id
        assert control.cancel(id, "not any more") == "cancelled"
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 0
        start_worker("--queue", "default")
        wait_until(lambda: timezone.now() > due)
        other = jobtasks.add.enqueue(1, 2).id
        wait_for_state(other, "completed")
        assert marks(trace) == [] and job(id).state == "cancelled"


class TestDrain:
    def test_does_what_there_is_and_ends(self, start_worker: StartWorker, trace: str) -> None:
        ids = [jobtasks.add.enqueue(n, n).id for n in range(25)]
        retried = jobtasks.fail.enqueue().id
        later = jobtasks.add.using(run_after=timezone.now() + dt.timedelta(hours=1)).enqueue(1, 1)
        worker = start_worker("--queue", "default", "--drain", "--concurrency", "4", ready=False)
        assert worker.wait(60) == 0
        assert set(Job.objects.filter(pk__in=ids).values_list("state", flat=True)) == {"completed"}
        assert job(retried).state == "failed" and job(later.id).state == "scheduled"

    def test_takes_only_its_queues(self, start_worker: StartWorker) -> None:
        mail = jobtasks.add.using(queue_name="mail").enqueue(1, 1).id
        sms = jobtasks.add.using(queue_name="sms").enqueue(1, 1).id
        rest = jobtasks.add.using(queue_name="rest").enqueue(1, 1).id
        worker = start_worker("--queue", "mail,sms", "--drain", ready=False)
        assert worker.wait(60) == 0
        states = [job(id).state for id in (mail, sms, rest)]
        assert states == ["completed", "completed", "ready"]
