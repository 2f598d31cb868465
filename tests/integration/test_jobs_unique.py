"""Unique jobs: one per key while it waits or runs, or for a time, also when two race for it."""

from __future__ import annotations

import datetime as dt
import threading
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction
from django.utils import timezone

from echomq_app.exceptions import InvalidArgument
from echomq_app.jobs import control
from echomq_app.jobs.outcomes import Ending
from echomq_app.jobs.results import JobResult
from echomq_app.jobs.tasks_api import InvalidTask, task_enqueued
from echomq_app.jobs.transitions import settle
from echomq_app.models import Job, Outbox, Record, UniqueWindow
from tests import jobtasks
from tests.databases import concurrently, in_thread, waiting_sessions
from tests.integration.jobs import USING, claim, history, outcome, register
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

add: Any = jobtasks.add
echo: Any = jobtasks.once_per_arguments


def enqueue(**options: Any) -> JobResult:
    result = add.using(**options).enqueue(1, 2)
    assert isinstance(result, JobResult)
    return result


def finish(ending: Ending = Ending.RETURNED, **more: Any) -> None:
    (claimed,) = claim(register())
    settle(USING, [outcome(claimed, ending, **more)])


class TestWhileItWaitsOrRuns:
    def test_a_second_enqueue_gives_the_first_job(self) -> None:
        heard: list[str] = []

        def receiver(task_result: Any, **kwargs: object) -> None:
            heard.append(task_result.id)

        task_enqueued.connect(receiver)
        try:
            first, second = enqueue(unique="k"), enqueue(unique="k")
        finally:
            task_enqueued.disconnect(receiver)
        assert second.id == first.id and second.duplicate and not first.duplicate
        assert second.state == "ready" and second.args == [1, 2]
        assert heard == [first.id] and history(first.id) == ["enqueued"]
        assert Job.objects.count() == 1
        assert enqueue(unique="other").id != first.id
        assert enqueue().id != enqueue().id

    def test_it_is_unique_until_its_end(self) -> None:
        later = timezone.now() + dt.timedelta(hours=1)
        first = enqueue(unique="k", run_after=later)
        assert enqueue(unique="k").id == first.id  # scheduled
        Job.objects.update(state="ready", run_after=timezone.now())
        (claimed,) = claim(register())
        assert enqueue(unique="k").id == first.id  # running
        settle(USING, [outcome(claimed, Ending.RAISED, error={"class": "E", "message": ""})])
        assert enqueue(unique="k").id == first.id  # waits for its next attempt
        assert control.cancel(first.id) == "cancelled"
        second = enqueue(unique="k")
        assert second.id != first.id and not second.duplicate

    def test_the_scope_is_the_task_and_its_arguments(self) -> None:
        first = echo.enqueue(1, b={"x": 1, "y": 2})
        assert echo.enqueue(1, b={"y": 2, "x": 1}).id == first.id
        assert echo.using(queue_name="mail", priority=3).enqueue(1, b={"x": 1, "y": 2}).duplicate
        others = [echo.enqueue(2, b={"x": 1, "y": 2}), echo.enqueue(1), echo.enqueue(1, b=None)]
        assert len({first.id, *(other.id for other in others)}) == 4
        assert not echo.using(unique=False).enqueue(1).duplicate

    def test_a_key_is_the_same_for_every_task(self) -> None:
        first = enqueue(unique="k")
        again = echo.using(unique="k").enqueue(5)
        assert again.id == first.id and again.args == [1, 2] and again.task.func == add.func

    def test_a_rollback_frees_the_key(self) -> None:
        with transaction.atomic():
            enqueue(unique="k")
            assert enqueue(unique="k").duplicate  # its own transaction sees it
            transaction.set_rollback(True)
        assert not enqueue(unique="k").duplicate

    def test_a_duplicate_leaves_the_transaction_usable(self) -> None:
        enqueue(unique="k")
        with transaction.atomic():
            enqueue(unique="k")
            enqueue(unique="other")
        assert Job.objects.count() == 2

    def test_retry_by_hand_finds_that_another_has_the_key(self) -> None:
        first = enqueue(unique="k")
        finish(Ending.STOPPED)
        second = enqueue(unique="k")
        with transaction.atomic():
            assert control.retry(first.id) == "duplicate"
            assert Job.objects.get(pk=first.id).state == "cancelled"
        finish()
        assert control.retry(first.id) == "retried"
        assert enqueue(unique="k").id == first.id != second.id

    def test_the_look_for_the_first_uses_the_index(self) -> None:
        from echomq_app.jobs import unique

        plain = unique._ACTIVE.replace("%s", "'key:k'" if connection.vendor != "sqlite" else "?")
        with connection.cursor() as cursor:
            if connection.vendor == "sqlite":
                cursor.execute(f"EXPLAIN QUERY PLAN {plain.replace('?', '%s')}", ("key:k",))
            else:
                cursor.execute("SET enable_seqscan = off")
                cursor.execute(f"EXPLAIN {plain}")
            plan = str(cursor.fetchall())
            if connection.vendor != "sqlite":
                cursor.execute("RESET enable_seqscan")
        assert "echomq_job_unique" in plan


class TestForATime:
    def test_also_when_the_first_has_ended(self) -> None:
        first = enqueue(unique="k", unique_for=3600)
        finish(result="3")
        again = enqueue(unique="k", unique_for=3600)
        assert again.id == first.id and again.duplicate
        assert again.return_value == 3

    def test_until_the_time_is_over_also_while_the_first_waits(self) -> None:
        first = enqueue(unique="k", unique_for=3600)
        UniqueWindow.objects.update(until=timezone.now() - dt.timedelta(seconds=1))
        second = enqueue(unique="k", unique_for=3600)
        assert second.id != first.id and not second.duplicate
        assert enqueue(unique="k", unique_for=3600).id == second.id
        assert UniqueWindow.objects.get().until > timezone.now() + dt.timedelta(seconds=3000)

    def test_a_deleted_job_frees_its_key(self) -> None:
        first = enqueue(unique="k", unique_for=3600)
        Job.objects.all().delete()
        second = enqueue(unique="k", unique_for=3600)
        assert second.id != first.id and enqueue(unique="k", unique_for=3600).id == second.id

    def test_a_rollback_frees_the_key(self) -> None:
        with transaction.atomic():
            enqueue(unique="k", unique_for=3600)
            transaction.set_rollback(True)
        assert not enqueue(unique="k", unique_for=3600).duplicate


@pytest.mark.parametrize("window", [{}, {"unique_for": 3600}], ids=["active", "window"])
class TestRaces:
    def test_many_at_once_are_one(self, window: dict[str, Any]) -> None:
        for n in range(5):
            barrier = threading.Barrier(6)

            def race(key: str = f"k{n}", barrier: threading.Barrier = barrier) -> JobResult:
                barrier.wait()
                return enqueue(unique=key, **window)

            results = concurrently(*[race] * 6)
            assert len({result.id for result in results}) == 1
            assert sorted(result.duplicate for result in results) == [False] + [True] * 5
        assert Job.objects.count() == 5

    @pytest.mark.postgres
    @pytest.mark.parametrize("commits", [True, False])
    def test_the_second_waits_for_the_first_ones_end(
        self, window: dict[str, Any], commits: bool
    ) -> None:
        enqueued, release = threading.Event(), threading.Event()

        def first() -> JobResult:
            with transaction.atomic():
                result = enqueue(unique="k", **window)
                enqueued.set()
                assert release.wait(60)
                transaction.set_rollback(not commits)
                return result

        with in_thread(first) as holder:
            assert enqueued.wait(60)
            with in_thread(lambda: enqueue(unique="k", **window)) as follower:
                wait_until(lambda: waiting_sessions() == 1)
                release.set()
        result = follower.result()
        assert result.duplicate is commits and (result.id == holder.result().id) is commits
        assert Job.objects.count() == 1

    @pytest.mark.postgres
    @pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
    def test_an_old_snapshot_is_told_to_try_again(self, window: dict[str, Any], level: str) -> None:
        """It can't see the job that has the key, so it can't give it."""
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            cursor.execute("SELECT 1 FROM echomq_job")
            concurrently(lambda: enqueue(unique="k", **window))
            with pytest.raises(DatabaseError, match="could not serialize"):
                enqueue(unique="k", **window)
            transaction.set_rollback(True)
        assert Job.objects.count() == 1


def test_nothing_is_recorded_for_a_duplicate() -> None:
    for window in ({}, {"unique_for": 60}):
        enqueue(unique="k", **window)
        before = Outbox.objects.count() + Record.objects.count()
        assert enqueue(unique="k", **window).duplicate
        assert Outbox.objects.count() + Record.objects.count() == before


@pytest.mark.parametrize(
    "wrong", [{"unique": ""}, {"unique": 5}, {"unique": "a\0"}, {"unique": True, "unique_for": 0}]
)
def test_wrong_options_are_refused_before_anything_is_written(wrong: dict[str, Any]) -> None:
    with pytest.raises((InvalidTask, InvalidArgument), match="unique"):
        add.using(**wrong)
