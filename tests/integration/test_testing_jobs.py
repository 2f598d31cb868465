"""What users have for tests of their jobs, used as they would use it."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models import Q
from django.test import TestCase, TransactionTestCase
from django.utils import timezone

from echomq_app import events
from echomq_app.core.ids import new_job_id
from echomq_app.jobs import control, health
from echomq_app.jobs.tasks_api import task_finished
from echomq_app.models import Job, Worker
from echomq_app.stream import Stream
from echomq_app.testing import (
    arun_jobs,
    capture_events,
    fake_clock,
    flush_outbox,
    run_jobs,
)
from tests import jobtasks


def names(ran: list[Any]) -> list[tuple[str, str]]:
    return [(result.task.name, result.state) for result in ran]


class TestRunJobs(TestCase):
    """In a test's transaction that is never committed."""

    def test_runs_what_is_ready_and_returns_it(self) -> None:
        first = jobtasks.add.enqueue(1, 2)
        second = jobtasks.aadd.enqueue(3, 4)
        ran = run_jobs()
        assert [result.id for result in ran] == [first.id, second.id]
        assert [result.return_value for result in ran] == [3, 7]
        first.refresh()
        assert first.return_value == 3
        assert run_jobs() == []
        assert not Worker.objects.exists()

    def test_in_order_of_queue_priority_and_time(self) -> None:
        for queue, priority in (("b", 9), ("a", 0), ("a", 5), ("a", 0)):
            jobtasks.add.using(queue_name=queue, priority=priority).enqueue(1, 2)
        ran = run_jobs()
        assert [(result.task.queue_name, result.task.priority) for result in ran] == [
            ("a", 5),
            ("a", 0),
            ("a", 0),
            ("b", 9),
        ]
        assert ran[1].id < ran[2].id

    def test_of_some_queues_only(self) -> None:
        jobtasks.add.using(queue_name="mail").enqueue(1, 2)
        jobtasks.add.using(queue_name="other").enqueue(1, 2)
        assert len(run_jobs("mail")) == 1
        assert Job.objects.get(queue="other").state == "ready"

    def test_handlers_work_in_the_tests_transaction(self) -> None:
        results = [jobtasks.query.enqueue(), jobtasks.aquery.enqueue()]
        assert [result.return_value for result in run_jobs()] == [2, 2]
        assert len(results) == 2

    def test_failures_do_not_raise_and_each_attempt_is_told(self) -> None:
        jobtasks.fail.enqueue("on purpose")
        ran = run_jobs()
        assert names(ran) == [("fail", "ready"), ("fail", "ready"), ("fail", "failed")]
        assert "on purpose" in ran[-1].errors[-1].traceback

    def test_context_progress_and_cancel(self) -> None:
        result = jobtasks.add.enqueue(1, 2)
        control.cancel(result.id, "enough")
        assert run_jobs() == []
        with capture_events() as heard:
            jobtasks.times_out.enqueue()
            (ran,) = run_jobs()
        assert ran.state == "failed"
        assert [event.event for event in heard] == ["started", "failed", "enqueued"]

    def test_signals_are_sent(self) -> None:
        got: list[str] = []

        def receive(task_result: Any, **kwargs: Any) -> None:
            got.append(task_result.id)

        task_finished.connect(receive)
        try:
            result = jobtasks.add.enqueue(1, 2)
            run_jobs()
        finally:
            task_finished.disconnect(receive)
        assert got == [result.id]

    def test_the_log_has_each_step(self) -> None:
        result = jobtasks.add.enqueue(1, 2)
        run_jobs()
        flush_outbox()
        told = [record.type for record in Stream("emq.default").read(key=result.id).records]
        assert told == ["enqueued", "started", "completed"]

    def test_a_job_that_enqueues_itself_for_ever(self) -> None:
        jobtasks.fail.using(max_attempts=1_000_000).enqueue()
        with pytest.raises(RuntimeError, match="after 5 attempts"):
            run_jobs(limit=5)
        assert not Worker.objects.exists()

    def test_leaves_no_language_behind(self) -> None:
        for _ in range(2):
            jobtasks.activate_language.enqueue("de")
        first, second = run_jobs()
        assert first.return_value == second.return_value

    async def test_async(self) -> None:
        await jobtasks.aadd.aenqueue(1, 2)
        (ran,) = await arun_jobs()
        assert ran.return_value == 3


class TestRunJobsForReal(TransactionTestCase):
    """Where each step is committed."""

    def test_sync_and_async(self) -> None:
        jobtasks.query.enqueue()
        jobtasks.aquery.enqueue()
        assert [result.return_value for result in run_jobs()] == [2, 2]


class TestFakeClock(TestCase):
    def test_due_times(self) -> None:
        later = timezone.now() + dt.timedelta(hours=2)
        jobtasks.add.using(run_after=later).enqueue(1, 2)
        assert run_jobs() == []
        with fake_clock() as clock:
            clock.advance(hours=1)
            assert run_jobs() == []
            clock.advance(dt.timedelta(minutes=61))
            assert names(run_jobs()) == [("add", "completed")]

    def test_retries_with_backoff(self) -> None:
        task = jobtasks.fail.using(backoff=1_000)
        task.enqueue()
        states = []
        with fake_clock() as clock:
            for _ in range(4):
                states += [result.state for result in run_jobs()]
                clock.advance(seconds=5_000)
        assert states == ["scheduled", "scheduled", "failed"]

    def test_retention(self) -> None:
        jobtasks.add.using(retention=3_600).enqueue(1, 2)
        jobtasks.add.enqueue(3, 4)
        assert len(run_jobs()) == 2
        with fake_clock() as clock:
            clock.advance(minutes=59)
            run_jobs()
            assert Job.objects.count() == 2
            clock.advance(minutes=2)
            run_jobs()
            assert [job.arguments["args"] for job in Job.objects.all()] == [[3, 4]]

    def test_unique_windows(self) -> None:
        task = jobtasks.add.using(unique="once", unique_for=3_600)
        first = task.enqueue(1, 2)
        run_jobs()
        with fake_clock() as clock:
            clock.advance(minutes=59)
            assert task.enqueue(1, 2).id == first.id
            clock.advance(minutes=2)
            run_jobs()
            assert task.enqueue(1, 2).id != first.id

    def test_cancels_retries_and_pauses(self) -> None:
        one, two = jobtasks.add.enqueue(1, 2), jobtasks.add.using(queue_name="b").enqueue(1, 2)
        with fake_clock() as clock:
            clock.advance(days=1)
            at = clock.now
            control.cancel(one.id)
            control.cancel_many(Q(pk=two.id))
            finished = [Job.objects.get(pk=result.id).finished_at for result in (one, two)]
            assert all(moment is not None and moment >= at for moment in finished)
            control.retry(one.id)
            again = Job.objects.get(pk=one.id)
            assert again.run_after >= at and again.enqueued_at < at
            control.pause("b")
            (paused,) = control.paused()
            assert paused.paused_at >= at
            (ran,) = run_jobs()
            assert ran.id == one.id and ran.finished_at is not None and ran.finished_at >= at

    def test_health(self) -> None:
        Worker.objects.register(
            name="w", host="h", pid=1, queues=["default"], concurrency=1, lease=600
        )
        jobtasks.add.enqueue(1, 2)
        with fake_clock() as clock:
            clock.advance(hours=2)
            found = health.report(["default"])["queues"]["default"]
        assert 7_200 <= found["oldest_ready"] < 7_260
        assert found["workers"] == 1  # leases follow the real clock

    def test_ends_with_the_block_and_goes_forwards_only(self) -> None:
        with fake_clock() as clock:
            clock.advance(days=1)
            assert clock.now > timezone.now() + dt.timedelta(hours=23)
            with pytest.raises(ValueError, match="forwards"):
                clock.advance(seconds=-1)
        with fake_clock() as clock:
            assert clock.now < timezone.now() + dt.timedelta(hours=1)


class TestCaptureEvents(TestCase):
    def test_what_waits_for_the_commit_is_there_after_the_block(self) -> None:
        with capture_events("default") as heard:
            result = jobtasks.add.enqueue(1, 2)
            jobtasks.add.using(queue_name="other").enqueue(1, 2)
            assert heard == []
        assert [(e.event, str(e.job_id)) for e in heard] == [("enqueued", result.id)]

    def test_rolled_back_is_never_there(self) -> None:
        with capture_events() as heard, transaction.atomic():
            jobtasks.add.enqueue(1, 2)
            transaction.set_rollback(True)
        assert heard == []

    def test_not_what_was_before_or_comes_after(self) -> None:
        jobtasks.add.enqueue(1, 2)
        with capture_events() as heard:
            pass
        jobtasks.add.enqueue(1, 2)
        assert heard == []

    def test_published_by_hand_at_once_and_on_commit(self) -> None:
        id = new_job_id()
        with capture_events() as heard:
            events.publish("mail", "opened", id, {"by": "me"})
            assert [(e.queue, e.event, e.data) for e in heard] == [("mail", "opened", {"by": "me"})]
            events.publish_on_commit("mail", "closed", id)
        assert [e.event for e in heard] == ["opened", "closed"]

    def test_callbacks_of_others_are_left_alone(self) -> None:
        called: list[int] = []
        with capture_events():
            transaction.on_commit(lambda: called.append(1))
        assert called == []
        assert len(connection.run_on_commit) == 1

    def test_with_djangos_own_capture(self) -> None:
        with capture_events() as heard, self.captureOnCommitCallbacks(execute=True):
            jobtasks.add.enqueue(1, 2)
        assert [event.event for event in heard] == ["enqueued"]


@pytest.mark.django_db(transaction=True)
def test_everything_of_one_job(tmp_path: Path) -> None:
    with capture_events() as heard:
        jobtasks.note.enqueue(str(tmp_path / "trace"))
        run_jobs()
    assert [event.event for event in heard] == ["enqueued", "started", "completed"]
