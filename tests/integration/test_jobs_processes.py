"""Handlers in processes: what comes back, what reaches them, and what becomes of a dead one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from django.db import connection

from echomq_app.core.ids import new_job_id
from echomq_app.jobs import control
from echomq_app.jobs.claims import ClaimedJob
from echomq_app.jobs.handler_process import HandlerProcess
from echomq_app.jobs.process_claim import pack, unpack
from echomq_app.jobs.process_pool import ProcessPool
from echomq_app.jobs.worker import Worker
from echomq_app.models import Job
from echomq_app.models.times import now
from echomq_app.testing import run_jobs
from tests import jobtasks, processtasks
from tests.integration.jobs import finished, hearing, records, running_worker
from tests.jobtasks import marks
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

SLOW = 60.0
"""Seconds: a process has to start, on a machine that may stall."""


def worker(**options: Any) -> AbstractContextManager[Worker]:
    return running_worker(**{"process_concurrency": 2, "lease": 30.0, "heartbeat": 1.0, **options})


Start = Callable[..., AbstractContextManager[Worker]]


class Kept(ProcessPool):
    """Goes from worker to worker: a process takes a second to start."""

    def kill_busy(self) -> None:
        pass

    def close(self, timeout: float) -> None:
        pass


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Kept]]:
    """Give pools of one and of two processes."""
    kept = {limit: Kept(limit) for limit in (1, 2)}
    yield kept
    for pool in kept.values():
        ProcessPool.kill_busy(pool)
        ProcessPool.close(pool, SLOW)


@pytest.fixture
def kept_worker(pools: dict[int, Kept]) -> Start:
    """Give a function like `worker`, for tests that end no process."""

    @contextlib.contextmanager
    def start(*, processes: int = 2, **options: Any) -> Iterator[Worker]:
        with worker(**options) as running:
            running._attempts._processes = pools[processes]
            yield running

    return start


def value(job: Job) -> Any:
    return job.result


def ended(result: Any) -> Job:
    return finished(result.id, timeout=SLOW)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(tmp_path / "trace")


def wait_for_marks(trace: str, count: int) -> list[str]:
    wait_until(lambda: len(marks(trace)) >= count, SLOW, f"{count} marks")
    return marks(trace)


class TestWhatComesBack:
    def test_results_of_the_main_thread_of_another_process_which_is_kept(
        self, kept_worker: Start
    ) -> None:
        with kept_worker(processes=1):
            jobs = [ended(processtasks.pid.enqueue()) for _ in range(2)]
            big = ended(processtasks.echo.enqueue({"n": 2**70, "t": "ü\u2029", "f": 0.1}))
            languages = [ended(processtasks.activate_language.enqueue("de")) for _ in range(2)]
        pids, main = zip(*map(value, jobs), strict=True)
        assert len(set(pids)) == 1 and os.getpid() not in pids
        assert all(main)
        assert big.result == {"n": 2**70, "t": "ü\u2029", "f": 0.1}
        assert languages[0].result == languages[1].result

    def test_failures_as_text(self, kept_worker: Start) -> None:
        with kept_worker():
            raised, refused, left = (
                ended(task.enqueue())
                for task in (processtasks.raises, processtasks.returns_a_set, processtasks.exits)
            )
            odd = ended(processtasks.stops_oddly.enqueue())
        assert (odd.state, odd.cancel_reason) == ("cancelled", "7")
        assert [job.state for job in (raised, refused, left)] == ["failed"] * 3
        (error,) = raised.errors
        assert error["class"] == "tests.processtasks.CannotBeRebuilt"
        assert error["message"] == "on purpose"
        assert "in raises" in error["traceback"] and error["worker"] == raised.worker_name
        assert refused.errors[0]["class"] == "echomq_app.exceptions.InvalidResult"
        assert left.errors[0]["class"] == "builtins.SystemExit"

    def test_progress_of_which_the_last_is_never_lost_and_no_flood_comes(
        self, kept_worker: Start
    ) -> None:
        with hearing() as heard, kept_worker():
            job = ended(processtasks.reports.enqueue(20_000))
            # What was committed is published right after.
            wait_until(lambda: any(event.event == "completed" for event in heard))
            told = [event.data for event in heard.so_far() if event.event == "progress"]
        assert (job.progress, job.progress_note) == (1.0, "all")
        assert told[-1]["note"] == "all" and len(told) < 200
        assert value(job) < 20

    def test_at_most_so_many_processes_at_once(self, trace: str, kept_worker: Start) -> None:
        with kept_worker(concurrency=5):
            jobs = [processtasks.waits_for.enqueue(trace) for _ in range(4)]
            wait_for_marks(trace, 2)
            assert ended(jobtasks.add.enqueue(1, 2)).state == "completed"  # meanwhile
            assert len(marks(trace)) == 2
            Path(f"{trace}.go").touch()
            pids = {ended(job).result for job in jobs}
        assert len(pids) == 2

    def test_a_job_keeps_all_that_it_was_claimed_with(self) -> None:
        at = now()
        claimed = ClaimedJob(
            id=new_job_id(),
            queue="q",
            task_path="a.b",
            arguments={"args": [2**80, float("inf"), "\ud7ff"], "kwargs": {"k": None}},
            priority=-3,
            run_after=at,
            attempt=2,
            max_attempts=3,
            options={"process": True, "timeout": 1.5},
            fence=7,
            errors=[{"class": "E", "at": "2026-01-01"}],
            enqueued_at=at,
            started_at=at,
            attempted_at=at,
            worker_name="w",
        )
        assert unpack(pack(claimed)) == claimed

    def test_run_jobs_runs_them_here(self) -> None:
        processtasks.pid.enqueue()
        (ran,) = run_jobs()
        assert ran.return_value[0] == os.getpid()


class TestCancel:
    def test_reaches_it_at_once_with_reason_and_kind(self, trace: str, kept_worker: Start) -> None:
        with kept_worker(poll=60.0):
            result = processtasks.until_cancelled.enqueue(trace)
            wait_for_marks(trace, 1)
            wait_until(lambda: Job.objects.get(pk=result.id).progress == 0.5, SLOW)
            asked = time.monotonic()
            control.cancel(result.id, "enough", "admin")
            wait_for_marks(trace, 2)
            assert time.monotonic() - asked < 5
            job = ended(result)
        assert marks(trace)[1] == "cancelled enough admin"
        assert (job.state, job.cancel_reason, job.cancel_kind) == ("cancelled", "enough", "admin")
        assert (job.progress, job.progress_note) == (0.5, "halfway")

    def test_async_handlers_run_on_a_loop_and_may_ignore_it(
        self, trace: str, kept_worker: Start
    ) -> None:
        with kept_worker():
            result = processtasks.asleep.enqueue(trace)
            wait_for_marks(trace, 1)
            control.cancel(result.id, "enough")
            job = ended(result)
        assert marks(trace)[1] == "cancelled enough user"
        assert (job.state, value(job)[1], job.progress_note) == ("completed", True, "async")

    def test_timeout(self, kept_worker: Start) -> None:
        with kept_worker():
            job = ended(processtasks.times_out.enqueue())
        assert (job.state, job.errors[0]["class"]) == ("failed", "builtins.TimeoutError")

    def test_of_a_job_that_waits_for_a_process(self, trace: str, kept_worker: Start) -> None:
        with kept_worker(processes=1):
            first = processtasks.waits_for.enqueue(trace)
            wait_for_marks(trace, 1)
            waiting = processtasks.pid.enqueue(f"{trace}2")
            wait_until(lambda: Job.objects.get(pk=waiting.id).state == "running")
            control.cancel(waiting.id, "not needed")
            job = ended(waiting)
            assert (job.state, job.cancel_reason) == ("cancelled", "not needed")
            Path(f"{trace}.go").touch()
            assert ended(first).state == "completed"
        assert not marks(f"{trace}2")

    def test_the_next_handler_of_the_process_is_not_cancelled(
        self, trace: str, kept_worker: Start
    ) -> None:
        with kept_worker(processes=1):
            first = processtasks.until_cancelled.enqueue(trace, then="return")
            wait_for_marks(trace, 1)
            control.cancel(first.id)
            assert ended(first).state == "completed"
            second = processtasks.until_cancelled.enqueue(trace, then="return")
            wait_for_marks(trace, 3)
            assert Job.objects.get(pk=second.id).state == "running"
            control.cancel(second.id, "now")
            assert ended(second).state == "completed"
        assert marks(trace)[-1] == "cancelled now user"


class TestDeath:
    def test_fails_that_attempt_alone(self, tmp_path: Path) -> None:
        says = {
            "kill": "SIGKILL",
            "exit": "exit code 7",
            "fault": "SIGSEGV",
            "leave a child": "SIGKILL",
        }
        with worker(process_concurrency=3):
            trace = str(tmp_path / "beside")
            beside = processtasks.waits_for.enqueue(trace)
            wait_for_marks(trace, 1)
            dead = {how: processtasks.dies.enqueue(str(tmp_path / how), how) for how in says}
            jobs = {how: ended(result) for how, result in dead.items()}
            Path(f"{trace}.go").touch()
            other = ended(beside)
        for how, job in jobs.items():
            start, *children = marks(tmp_path / how)
            for pid in children:
                os.kill(int(pid), signal.SIGKILL)
            (error,) = job.errors
            assert (job.state, start) == ("failed", "start")
            assert error["class"] == "echomq_app.exceptions.ProcessLost"
            assert says[how] in error["message"]
        assert (other.state, other.attempt) == ("completed", 1)

    def test_copy_of_one_that_comes_back_from_the_handler_ends(self, kept_worker: Start) -> None:
        with kept_worker():
            assert ended(processtasks.forks.enqueue()).result == 1

    def test_the_pool_goes_on_with_a_new_one(self, trace: str) -> None:
        with worker(process_concurrency=1):
            before = ended(processtasks.pid.enqueue())
            job = ended(processtasks.dies_once.using(backoff=0).enqueue(trace))
            after = ended(processtasks.pid.enqueue())
            os.kill(value(after)[0], signal.SIGKILL)  # also one that is killed while idle
            again = ended(processtasks.pid.enqueue())
        assert (job.state, job.result, job.attempt) == ("completed", "second", 2)
        assert len({value(one)[0] for one in (before, after, again)}) == 3
        assert again.attempt == 1

    def test_one_that_holds_too_much_is_replaced_in_good_order(self, trace: str) -> None:
        with worker(process_concurrency=1, max_rss=2**20) as running:
            kept = [value(ended(processtasks.says_when_it_ends.enqueue(trace))) for _ in range(2)]
            running._attempts._processes._max_memory = 2**20  # nothing can hold as little
            last = value(ended(processtasks.says_when_it_ends.enqueue(trace)))
            wait_until(lambda: marks(trace) == ["end"] * 3, SLOW)
            fresh = value(ended(processtasks.pid.enqueue()))[0]
        assert kept == [last, last] and fresh != last

    def test_django_that_cannot_be_set_up_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "no_such_settings")
        with worker():
            job = ended(processtasks.pid.using(max_attempts=1).enqueue())
        assert job.state == "failed"
        assert "couldn't begin" in job.errors[0]["message"]
        assert "no_such_settings" in job.errors[0]["message"]


class TestShutdown:
    def test_handler_that_stops_hands_its_job_back(self, trace: str) -> None:
        with worker():
            result = processtasks.until_cancelled.enqueue(trace)
            wait_for_marks(trace, 1)
        assert marks(trace)[1] == "cancelled shutdown shutdown"
        job = Job.objects.get(pk=result.id)
        assert (job.state, job.attempt, job.errors) == ("ready", 0, [])
        assert [type for type, _ in records(result.id)] == ["enqueued", "started", "retrying"]

    def test_handler_that_ignores_it_is_ended_before_its_job_is_handed_back(
        self, trace: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with worker(grace=0.2) as running:
            result = processtasks.until_cancelled.enqueue(trace, then="stay")
            (start,) = wait_for_marks(trace, 1)
            pid = int(start.split()[-1])
            put, gone = running._completer.put, threading.Event()

            def look_first(outcome: Any) -> None:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)
                gone.set()
                put(outcome)

            monkeypatch.setattr(running._completer, "put", look_first)
        assert gone.is_set() and running.left_behind == 1
        job = Job.objects.get(pk=result.id)
        assert (job.state, job.attempt, job.errors) == ("ready", 0, [])

    def test_processes_and_what_waits_for_them_end_with_the_worker(self, trace: str) -> None:
        with worker(process_concurrency=1, grace=0.2):
            idle = value(ended(processtasks.pid.enqueue()))[0]
            busy = processtasks.until_cancelled.enqueue(trace, then="stay")
            wait_for_marks(trace, 1)
            waiting = processtasks.pid.enqueue()
            wait_until(lambda: Job.objects.get(pk=waiting.id).state == "running")
        with pytest.raises(ProcessLookupError):
            os.kill(idle, 0)
        for result in (busy, waiting):
            job = Job.objects.get(pk=result.id)
            assert (job.state, job.attempt) == ("ready", 0)


def test_signals_before_it_has_begun_change_nothing() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    process = HandlerProcess()
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(process.pid, number)
        while not process._ready:  # an EOFError, if it has ended
            process._hear(lambda fraction, note: None)
        assert process.alive
    finally:
        process.close()
        process.reap(SLOW)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.postgres
def test_database_connections_are_closed_after_the_job() -> None:
    def open_sessions() -> set[int]:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pid FROM pg_stat_activity")
            return {pid for (pid,) in cursor.fetchall()}

    with worker():
        job = ended(processtasks.backend_pid.enqueue())
        wait_until(lambda: job.result not in open_sessions(), SLOW)
        idle = ended(processtasks.pid.enqueue())
        os.kill(value(idle)[0], 0)
