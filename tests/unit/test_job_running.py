"""One attempt in a worker: its token, who asked, and that it ends once."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from decimal import Decimal
from fractions import Fraction
from typing import Any, cast

import pytest
from django.utils.translation import gettext_lazy

from echomq_app import cancel
from echomq_app.core.ids import new_job_id
from echomq_app.exceptions import JobCancelled
from echomq_app.jobs.claims import ClaimedJob
from echomq_app.jobs.context import JobContext
from echomq_app.jobs.outcomes import Ending
from echomq_app.jobs.pools import LoopThread, ThreadPool
from echomq_app.jobs.running import Asked, RunningJob
from echomq_app.jobs.wakeup import Wakeup
from echomq_app.models.times import now
from tests.jobtasks import NoText
from tests.wait import wait_until


def running(**options: Any) -> RunningJob:
    at = now()
    return RunningJob(
        ClaimedJob(
            id=new_job_id(),
            queue="default",
            task_path="a.b",
            arguments={"args": [], "kwargs": {}},
            priority=0,
            run_after=at,
            attempt=1,
            max_attempts=3,
            options=options,
            fence=1,
            errors=[],
            enqueued_at=at,
            started_at=at,
            attempted_at=at,
            worker_name="w",
        )
    )


class TestRunningJob:
    def test_first_who_asks_decides_what_a_stop_means(self) -> None:
        job = running()
        job.ask(Asked.SHUTDOWN, "shutdown")
        job.ask(Asked.CANCEL, "enough")
        assert job.asked is Asked.SHUTDOWN and job.token.reason == "shutdown"
        outcome = job.finish(Ending.STOPPED, at=now())
        assert outcome is not None and outcome.by_worker

    def test_a_reason_called_shutdown_is_no_shutdown(self) -> None:
        job = running()
        job.ask(Asked.CANCEL, "shutdown")
        outcome = job.finish(Ending.STOPPED, at=now())
        assert outcome is not None and not outcome.by_worker

    def test_timeout_is_told_from_a_cancel(self) -> None:
        job = running(timeout=0.01)
        assert not job.token.wait(0.05)  # its clock doesn't run yet
        job.start_clock()
        assert job.token.wait(5) and job.timed_out and job.asked is None
        asked = running(timeout=60)
        asked.start_clock()
        asked.ask(Asked.CANCEL, "enough")
        assert asked.token.reason == "enough" and not asked.timed_out

    def test_ends_once_whoever_comes_first(self) -> None:
        for _ in range(50):
            job = running()
            barrier = threading.Barrier(2)
            ends: list[object] = []

            def end(
                job: RunningJob = job,
                barrier: threading.Barrier = barrier,
                ends: list[object] = ends,
            ) -> None:
                barrier.wait()
                ends.append(job.finish(Ending.HANDED_BACK, at=now()))

            threads = [threading.Thread(target=end) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sum(outcome is not None for outcome in ends) == 1 and job.finished


class TestContext:
    def context(self) -> tuple[JobContext, list[tuple[float, str]]]:
        reports: list[tuple[float, str]] = []
        context = JobContext(
            task_result=cast(Any, None),
            job_id=new_job_id(),
            cancel=cancel.new(),
            _attempt=2,
            _report=lambda fraction, note: reports.append((fraction, note)),
        )
        return context, reports

    def test_progress_is_checked_and_made_storable(self) -> None:
        context, reports = self.context()
        context.progress(1, "a\0b" + "x" * 1000)
        ((fraction, note),) = reports
        assert fraction == 1.0 and len(note) == 255 and "\0" not in note

    @pytest.mark.parametrize(
        ("given", "stored"),
        [
            ((1001 / 1000,), 1.0),
            ((sum([0.1] * 10) + 3e-16,), 1.0),
            ((-0.1,), 0.0),
            ((float("inf"),), 1.0),
            ((float("-inf"),), 0.0),
            ((float("nan"),), 0.0),
            ((True,), 1.0),
            ((Decimal("0.25"),), 0.25),
            ((Fraction(1, 4),), 0.25),
            ((10**400,), 1.0),
            ((1, 4), 0.25),
            ((Decimal(1), 4.0), 0.25),
            ((0, 0), 1.0),
            ((3, 0), 1.0),
            ((1001, 1000), 1.0),
            ((-1, 10), 0.0),
            ((float("nan"), 10), 0.0),
            ((1, float("nan")), 0.0),
        ],
    )
    def test_progress_is_clamped(
        self, given: tuple[Any, ...], stored: float, caplog: pytest.LogCaptureFixture
    ) -> None:
        context, reports = self.context()
        context.progress(*given)
        context.progress(*(*given, "a note"))
        context.progress(*given, note="a note")
        assert reports == [(stored, ""), (stored, "a note"), (stored, "a note")]
        assert not caplog.records

    def test_progress_takes_lazy_text(self) -> None:
        context, reports = self.context()
        context.progress(0.5, gettext_lazy("Yes"))
        assert reports == [(0.5, "Yes")]

    @pytest.mark.parametrize(
        "given",
        [
            ("50 %",),
            (None,),
            (1j,),
            ([],),
            (1, []),
            (Decimal("nan"),),
            (1, 2, NoText()),
            (0.5, NoText()),
        ],
    )
    def test_progress_that_makes_no_sense_is_logged_once_and_raises_nothing(
        self, given: tuple[Any, ...], caplog: pytest.LogCaptureFixture
    ) -> None:
        context, reports = self.context()
        for _ in range(3):
            context.progress(*given)
        assert reports == []
        (record,) = caplog.records
        assert record.levelname == "WARNING" and str(context.job_id) in record.getMessage()
        context.progress(0.5)
        assert reports == [(0.5, "")]

    def test_progress_that_nobody_takes_is_logged_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(fraction: float, note: str) -> None:
            raise OSError("no more of it")

        context, _ = self.context()
        context = dataclasses.replace(context, _report=broken)
        for _ in range(3):
            context.progress(0.5)
        (record,) = caplog.records
        assert "no more of it" in record.getMessage()

    def test_check_raises_with_the_reason(self) -> None:
        context, _ = self.context()
        context.check()
        context.cancel.cancel("enough")
        with pytest.raises(JobCancelled) as caught:
            context.check()
        assert caught.value.reason == "enough" and context.attempt == 2


class TestWakeup:
    def test_call_before_the_wait_is_not_lost(self) -> None:
        wakeup = Wakeup()
        wakeup.call()
        assert wakeup.wait(0) and not wakeup.wait(0)

    def test_closed_neither_waits_nor_pauses(self) -> None:
        wakeup = Wakeup()
        ended = threading.Event()

        def rest() -> None:
            wakeup.pause(60)
            wakeup.wait(60)
            ended.set()

        threading.Thread(target=rest, daemon=True).start()
        wakeup.close()
        assert ended.wait(10) and wakeup.closed


class TestPools:
    def test_threads_are_made_when_needed_and_kept(self) -> None:
        pool = ThreadPool("pool-under-test")
        gate, names = threading.Event(), list[str]()

        def call() -> None:
            names.append(threading.current_thread().name)
            gate.wait(10)

        for _ in range(3):
            pool.submit(call)
        wait_until(lambda: len(names) == 3)
        gate.set()
        assert len(set(names)) == 3
        wait_until(lambda: pool._idle == 3)
        pool.submit(call)
        wait_until(lambda: len(names) == 4)
        assert len(set(names)) == 3
        wait_until(lambda: pool._idle == 3)
        pool.close()

    def test_call_that_raises_ends_no_thread(self) -> None:
        pool = ThreadPool("pool-under-test")
        done = threading.Event()

        def fail() -> None:
            raise SystemExit

        pool.submit(fail)
        wait_until(lambda: pool._idle == 1)
        pool.submit(done.set)
        assert done.wait(10)
        pool.close()

    def test_loop_runs_tasks_side_by_side(self) -> None:
        loop = LoopThread("loop-under-test")
        barrier, done = asyncio.Barrier(3), threading.Event()

        async def meet() -> None:
            await barrier.wait()
            done.set()

        for _ in range(3):
            loop.submit(meet)
        assert done.wait(10)
        loop.close(5)
