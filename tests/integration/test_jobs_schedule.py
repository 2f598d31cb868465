"""Recurring jobs: one per tick however many look, missed ticks, clocks that change, settings."""

from __future__ import annotations

import datetime as dt
import re
import threading
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from django.utils import timezone
from pytest_django.fixtures import Settings

from echomq_app import checks
from echomq_app.exceptions import InvalidArgument
from echomq_app.jobs import schedule
from echomq_app.jobs.housekeeping import Housekeeper
from echomq_app.jobs.schedule import Entry
from echomq_app.jobs.schedule_claims import HOLD
from echomq_app.models import Job, Schedule, times
from tests import jobtasks
from tests.databases import concurrently, refusing, session
from tests.integration.jobs import USING, finished, running_worker
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

NOON = dt.datetime(2026, 3, 10, 12, 0, 30, tzinfo=dt.UTC)
MINUTE = dt.timedelta(minutes=1)


def made(name: str = "report", **given: Any) -> Entry:
    defaults = {
        "task": "tests.jobtasks.add",
        "cron": "* * * * *",
        "timezone": "UTC",
        "args": [1, 2],
    }
    return Entry(name=name, **{**defaults, **given})


def row(name: str = "report") -> Schedule:
    return Schedule.objects.get(pk=name)


class TestTicks:
    def test_one_job_per_tick(self) -> None:
        ours = [made(queue="mail", priority=7)]
        schedule.sync(USING, ours, NOON)
        assert schedule.run_due(USING, ours, NOON) == 30.0  # a new one waits for its first tick
        assert not Job.objects.exists()
        at = NOON + MINUTE
        assert schedule.run_due(USING, ours, at) == 30.0
        assert schedule.run_due(USING, ours, at) == 30.0
        job = Job.objects.get()
        assert (job.task_path, job.queue, job.priority) == ("tests.jobtasks.add", "mail", 7)
        assert job.arguments == {"args": [1, 2], "kwargs": {}}
        assert row().last_job_id == job.pk
        assert row().last_at == NOON.replace(minute=1, second=0)
        assert row().next_at == NOON.replace(minute=2, second=0)

    def test_many_workers_enqueue_one(self) -> None:
        ours = [made()]
        schedule.sync(USING, ours, NOON)
        for n in range(1, 6):
            barrier = threading.Barrier(5)

            def look(at: dt.datetime = NOON + n * MINUTE, barrier: Any = barrier) -> object:
                barrier.wait()
                return schedule.run_due(USING, ours, at)

            concurrently(*[look] * 5)
            assert Job.objects.count() == n

    @pytest.mark.postgres
    def test_a_schedule_that_somebody_is_at_is_passed_over(self) -> None:
        ours = [made(), made("other")]
        schedule.sync(USING, ours, NOON)
        with session() as other:
            other.execute("BEGIN")
            other.execute("SELECT 1 FROM echomq_schedule WHERE name = 'report' FOR UPDATE")
            schedule.run_due(USING, ours, NOON + MINUTE)  # waits for nobody
            assert Job.objects.count() == 1 and row("other").last_job_id
            other.execute("ROLLBACK")
        schedule.run_due(USING, ours, NOON + MINUTE)
        assert Job.objects.count() == 2

    def test_one_that_fails_stops_no_other(self, caplog: pytest.LogCaptureFixture) -> None:
        """Nor does it when its claim is renewed, or it is new."""
        ours = [made("a"), made("b")]
        schedule.sync(USING, ours, NOON)
        later = NOON + 2 * MINUTE
        with refusing("UPDATE", "echomq_schedule", "OLD.name = 'a'"):
            assert schedule.run_due(USING, ours, later) == 30.0
            assert not row("a").last_job_id and row("b").last_job_id
            assert row("b").claimed_until == later + dt.timedelta(seconds=HOLD)
        assert "doing=schedule item=a" in caplog.text
        schedule.run_due(USING, ours, later)
        assert row("a").last_job_id
        with refusing("INSERT", "echomq_schedule", "NEW.name = 'c'"):
            schedule.sync(USING, [made("c"), made("d")], NOON)
        assert set(Schedule.objects.values_list("pk", flat=True)) == {"a", "b", "d"}

    def test_the_tick_and_its_job_are_one_transaction(self) -> None:
        ours = [made()]
        schedule.sync(USING, ours, NOON)
        with transaction.atomic():
            schedule.run_due(USING, ours, NOON + MINUTE)
            assert Job.objects.count() == 1
            transaction.set_rollback(True)
        assert not Job.objects.exists() and row().last_at is None
        schedule.run_due(USING, ours, NOON + MINUTE)
        assert Job.objects.count() == 1

    @pytest.mark.parametrize("gone", ["tests.jobtasks.gone", "tests.script.gone"])
    def test_a_task_that_cannot_be_enqueued_is_told_and_the_next_tick_comes(
        self, gone: str
    ) -> None:
        ours = [made(task=gone), made("good")]
        schedule.sync(USING, ours, NOON)
        schedule.run_due(USING, ours, NOON + MINUTE)
        assert Job.objects.count() == 1
        assert "gone" in row().last_error and row().next_at == NOON.replace(minute=2, second=0)
        schedule.run_due(USING, [made()], NOON + 2 * MINUTE)
        assert row().last_error == "" and Job.objects.count() == 2

    def test_a_worker_runs_them(self, settings: Settings) -> None:
        settings.ECHOMQ = {
            "SCHEDULE": {
                "often": {"task": "tests.jobtasks.add", "cron": "* * * * * *", "args": [1, 2]}
            }
        }
        with running_worker():
            wait_until(Job.objects.exists)
            job = finished(str(Job.objects.order_by("pk").first().pk))  # type: ignore[union-attr]
        assert job.state == "completed"


class TestMissed:
    @pytest.mark.parametrize(
        ("missed", "down", "jobs"),
        [
            ("skip", 5, 1),  # the last tick is on time, those before it were missed
            ("once", 5, 1),
            ("all", 5, 5),
            ("all", 500_000, schedule.MISSED_MAX),
            ("once", 500_000, 1),
        ],
    )
    def test_by_policy(self, missed: str, down: int, jobs: int) -> None:
        ours = [made(missed=missed)]
        schedule.sync(USING, ours, NOON)
        at = NOON + down * MINUTE
        schedule.run_due(USING, ours, at)
        assert Job.objects.count() == jobs
        assert row().last_at == at.replace(second=0)
        assert row().next_at == at.replace(second=0) + MINUTE

    @pytest.mark.parametrize(("missed", "jobs"), [("skip", 0), ("once", 1), ("all", 1)])
    def test_the_last_one_too(self, missed: str, jobs: int) -> None:
        ours = [made(cron="0 13 * * *", missed=missed)]
        schedule.sync(USING, ours, NOON)
        schedule.run_due(USING, ours, NOON + dt.timedelta(hours=3))
        assert Job.objects.count() == jobs
        assert row().next_at == dt.datetime(2026, 3, 11, 13, tzinfo=dt.UTC)


class TestWrongClocks:
    def test_a_schedule_that_a_wrong_clock_sent_far_ahead_goes_on(self) -> None:
        ours = [made()]
        schedule.sync(USING, ours, NOON)
        schedule.run_due(USING, ours, NOON + dt.timedelta(days=2_000))
        assert row().next_at == NOON.replace(second=0) + MINUTE + dt.timedelta(days=2_000)
        assert schedule.run_due(USING, ours, NOON) == 30.0
        assert row().next_at == NOON.replace(second=0) + MINUTE
        schedule.run_due(USING, ours, NOON + MINUTE)
        assert Job.objects.count() == 2

    def test_a_clock_that_is_a_little_behind_runs_no_tick_twice(self) -> None:
        ours = [made()]
        schedule.sync(USING, ours, NOON)
        schedule.run_due(USING, ours, NOON + MINUTE)
        schedule.run_due(USING, ours, NOON - 8 * MINUTE)
        schedule.run_due(USING, ours, NOON + MINUTE)
        assert Job.objects.count() == 1

    @pytest.mark.postgres
    def test_workers_go_by_the_clock_of_the_database(
        self, monkeypatch: pytest.MonkeyPatch, settings: Settings
    ) -> None:
        ahead = dt.timedelta(days=1)
        monkeypatch.setattr(times, "now", lambda: dt.datetime.now(dt.UTC) + ahead)
        monkeypatch.setattr(timezone, "now", times.now)
        assert times.database_now(USING) < times.now() - ahead / 2
        jobtasks.noop.using(run_after=times.now() + dt.timedelta(hours=1)).enqueue(1)
        housekeeper = Housekeeper(USING, ["default"], interval=5, patience=30, on_ready=bool)
        assert housekeeper._promote() == 5
        said = {"report": {"task": "tests.jobtasks.add", "cron": "* * * * *"}}
        settings.ECHOMQ = {"SCHEDULE": said}
        housekeeper._tick()
        next_at = row().next_at
        assert next_at is not None and next_at < dt.datetime.now(dt.UTC) + 2 * MINUTE


class TestSettings:
    def test_a_changed_expression_counts_from_now(self) -> None:
        schedule.sync(USING, [made()], NOON)
        hourly = [made(cron="0 * * * *")]
        schedule.sync(USING, hourly, NOON)
        assert row().next_at == NOON.replace(hour=13, minute=0, second=0)
        # A worker of the deploy before leaves it alone.
        schedule.sync(USING, hourly, NOON + dt.timedelta(minutes=59))
        schedule.run_due(USING, [made()], NOON + dt.timedelta(hours=1))
        assert not Job.objects.exists()
        schedule.run_due(USING, hourly, NOON + dt.timedelta(hours=1))
        assert Job.objects.count() == 1
        schedule.sync(USING, [made(cron="0 * * * *", timezone="Asia/Kathmandu")], NOON)
        assert row().next_at == NOON.replace(hour=12, minute=15, second=0)

    def test_an_unchanged_one_keeps_its_tick(self) -> None:
        schedule.sync(USING, [made()], NOON)
        schedule.sync(USING, [made(args=[5, 6])], NOON + 5 * MINUTE)
        assert row().next_at == NOON.replace(minute=1, second=0)

    def test_a_removed_one_has_no_ticks_and_goes_in_the_end(self) -> None:
        schedule.sync(USING, [made(), made("other")], NOON)
        schedule.sync(USING, [made("other")], NOON)
        schedule.run_due(USING, [made("other")], NOON + MINUTE)
        assert Job.objects.get().pk == row("other").last_job_id
        after = NOON + dt.timedelta(days=30)
        schedule.sync(USING, [made("other")], after)
        assert Schedule.objects.prune(after) == 0
        assert Schedule.objects.prune(after + dt.timedelta(seconds=HOLD + 1)) == 1
        assert list(Schedule.objects.values_list("pk", flat=True)) == ["other"]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"cron": "every day"},
            {"cron": "* * * *"},
            {"cron": "61 * * * *"},
            {"cron": "0 0 30 2 *"},
            {"timezone": "Europe/Atlantis"},
            {"task": "tests.jobtasks.gone"},
            {"task": "tests.jobtasks.not_a_task"},
            {"args": [object()]},
            {"queue": "no queue name"},
            {"priority": 1000},
        ],
    )
    def test_what_is_wrong_is_found_by_a_check(
        self, settings: Settings, wrong: dict[str, Any]
    ) -> None:
        right = {"task": "tests.jobtasks.add", "cron": "0 2 * * *", "args": [1, 2]}
        settings.ECHOMQ = {"SCHEDULE": {"good": right}}
        assert list(checks.check_schedule()) == []
        settings.ECHOMQ = {"SCHEDULE": {"good": right, "bad": {**right, **wrong}}}
        (found,) = checks.check_schedule()
        assert found.id == "echomq.E009" and "'bad'" in found.msg

    @pytest.mark.parametrize(
        "wrong",
        [
            [],
            {"x": "0 2 * * *"},
            {"x": {"task": "a.b"}},
            {"x": {"cron": "0 2 * * *"}},
            {"x": {"task": "a.b", "cron": "0 2 * * *", "missed": "never"}},
            {"x": {"task": "a.b", "cron": "0 2 * * *", "priority": True}},
            {"x": {"task": "a.b", "cron": "0 2 * * *", "every": 5}},
            {"x" * 101: {"task": "a.b", "cron": "0 2 * * *"}},
        ],
    )
    def test_what_makes_no_sense_is_refused(self, settings: Settings, wrong: Any) -> None:
        settings.ECHOMQ = {"SCHEDULE": wrong}
        assert [message.id for message in checks.check_settings()] == ["echomq.E001"]
        assert list(checks.check_schedule()) == []


class TestManyVersions:
    """Workers with different settings side by side: a rollout, or two services."""

    def test_an_older_worker_that_starts_again_takes_nothing_away(self) -> None:
        old, new = [made("a")], [made("a"), made("b")]
        schedule.sync(USING, new, NOON)
        for n in range(1, 4):
            at = NOON + n * MINUTE
            schedule.sync(USING, old, at)
            schedule.run_due(USING, old, at)
            schedule.run_due(USING, new, at)
            assert Job.objects.count() == 2 * n

    def test_services_with_schedules_of_their_own(self) -> None:
        services = [[made("a")], [made("b", task="tests.jobtasks.noop", args=[1])]]
        for n in range(6):
            at = NOON + n * MINUTE
            for ours in services if n % 2 else reversed(services):
                schedule.sync(USING, ours, at)
                schedule.run_due(USING, ours, at)
        paths = Job.objects.values_list("task_path", flat=True)
        assert sorted(paths) == ["tests.jobtasks.add"] * 5 + ["tests.jobtasks.noop"] * 5

    def test_a_row_that_somebody_deleted_comes_back(self) -> None:
        ours = [made()]
        schedule.sync(USING, ours, NOON)
        Schedule.objects.all().delete()
        assert schedule.run_due(USING, ours, NOON) == 30.0
        schedule.run_due(USING, ours, NOON + MINUTE)
        assert Job.objects.count() == 1

    def test_the_newer_definition_counts_however_often_the_older_starts(self) -> None:
        old, new = [made()], [made(cron="*/2 * * * *")]
        schedule.sync(USING, old, NOON)
        schedule.sync(USING, new, NOON)
        for n in range(1, 7):
            at = NOON + n * MINUTE
            for ours in (old, new, old) if n % 2 else (old, old, new):
                schedule.sync(USING, ours, at)
                schedule.run_due(USING, ours, at)
            assert row().cron == "*/2 * * * *" and Job.objects.count() == n // 2
        assert row().superseded == [["tests.jobtasks.add", "* * * * *", "UTC"]]

    @pytest.mark.parametrize("starts_again", [True, False])
    def test_a_definition_comes_back_when_the_newer_is_gone(self, starts_again: bool) -> None:
        """And what it would have run meanwhile was missed, not lost."""
        old, new = [made(missed="all")], [made(cron="*/2 * * * *")]
        for ours in (old, new):
            schedule.sync(USING, ours, NOON)
        schedule.run_due(USING, new, NOON + 2 * MINUTE)  # for the last time
        assert Job.objects.count() == 1
        for n in range(2, 10):
            at = NOON + n * MINUTE
            if starts_again:
                schedule.sync(USING, old, at)
            schedule.run_due(USING, old, at)
            # Those of minute 3 and 4 come together with that of minute 5.
            assert Job.objects.count() == (1 if n < 5 else n - 1), n
        assert row().cron == "* * * * *"
        # The newer one, deployed again, waits until the other is gone.
        schedule.run_due(USING, new, NOON + 10 * MINUTE)
        assert row().cron == "* * * * *"
        schedule.run_due(USING, new, NOON + 20 * MINUTE)
        assert row().cron == "*/2 * * * *"

    def test_a_tick_that_is_due_when_the_definition_changes_is_not_lost(self) -> None:
        schedule.sync(USING, [made(cron="0 13 * * *")], NOON)
        new = [made(cron="0 14 * * *")]
        at = NOON.replace(hour=13, second=1)
        schedule.sync(USING, new, at)
        schedule.run_due(USING, new, at)
        schedule.run_due(USING, new, at)
        assert Job.objects.count() == 1
        assert row().next_at == NOON.replace(hour=14, second=0)

    def test_a_tick_and_a_change_at_the_same_moment_are_one_job(self) -> None:
        for n in range(1, 11):
            at = NOON + 2 * n * MINUTE
            # Each is new to the row.
            old, new = [made(cron=f"{n}-59 * * * *")], [made(cron=f"0,{n}-59 * * * *")]
            Schedule.objects.all().delete()
            schedule.sync(USING, old, at - MINUTE)
            barrier = threading.Barrier(2)

            def tick(barrier: Any = barrier, old: Any = old, at: Any = at) -> None:
                barrier.wait()
                schedule.run_due(USING, old, at)

            def change(barrier: Any = barrier, new: Any = new, at: Any = at) -> None:
                barrier.wait()
                schedule.sync(USING, new, at)

            concurrently(tick, change)
            for _ in range(2):
                schedule.run_due(USING, new, at)
            assert Job.objects.count() == n
            assert row().cron == new[0].cron

    def test_another_task_has_the_same_ticks(self) -> None:
        schedule.sync(USING, [made()], NOON)
        renamed = [made(task="tests.jobtasks.noop", args=[1])]
        schedule.sync(USING, renamed, NOON + MINUTE / 4)
        schedule.run_due(USING, [made()], NOON + MINUTE)
        assert not Job.objects.exists()  # the older one's task may be gone
        schedule.run_due(USING, renamed, NOON + MINUTE)
        assert Job.objects.get().task_path == "tests.jobtasks.noop"

    @pytest.mark.postgres
    def test_a_claim_waits_for_nobody(self) -> None:
        ours = [made(), made("other")]
        schedule.sync(USING, ours, NOON)
        with session() as other:
            other.execute("BEGIN")
            other.execute("SELECT 1 FROM echomq_schedule WHERE name = 'report' FOR UPDATE")
            schedule.sync(USING, ours, NOON + 2 * MINUTE)
            schedule.sync(USING, [made(cron="0 * * * *")], NOON + 2 * MINUTE)
            assert row("other").claimed_at == NOON + 2 * MINUTE
            assert row().claimed_at == NOON and row().cron == "* * * * *"
            other.execute("ROLLBACK")
        schedule.sync(USING, [made(cron="0 * * * *")], NOON + 2 * MINUTE)
        assert row().cron == "0 * * * *"

    def test_a_look_costs_one_statement_and_a_claim_is_renewed_now_and_then(
        self, django_assert_num_queries: Any
    ) -> None:
        ours = [made(f"report {n}", cron="0 * * * *") for n in range(10)]
        schedule.sync(USING, ours, NOON)
        for seconds in range(60):
            with django_assert_num_queries(1):
                schedule.run_due(USING, ours, NOON + dt.timedelta(seconds=seconds))
        schedule.run_due(USING, ours, NOON + dt.timedelta(seconds=61))
        with django_assert_num_queries(1):  # another worker's
            schedule.run_due(USING, ours, NOON + dt.timedelta(seconds=62))

    def test_workers_claim_what_is_in_their_settings(self, settings: Settings) -> None:
        said = {"report": {"task": "tests.jobtasks.add", "cron": "0 3 * * *", "args": [1, 2]}}
        settings.ECHOMQ = {"SCHEDULE": said}
        kept = Schedule.objects.create(name="another service's", task_path="a.b", cron="0 3 * * *")
        with running_worker():
            wait_until(lambda: Schedule.objects.filter(pk="report"))
        until = row().claimed_until
        assert until is not None and until > timezone.now()
        assert row(kept.name).claimed_until is None


def test_the_admin_shows_what_no_worker_has_in_its_settings(admin_client: Client) -> None:
    now = times.now()
    schedule.sync(USING, [made("left behind")], now - dt.timedelta(hours=1))
    Schedule.objects.create(name="by hand", task_path="a.b", cron="0 3 * * *")
    schedule.sync(USING, [made("alive")], now)
    page = admin_client.get("/admin/echomq/schedule/").content.decode()
    cells = re.findall(r'field-claim"><span class="echomq-state (\w+)', page)
    assert cells == ["completed", "failed", "failed"]  # by name
    assert admin_client.get("/admin/echomq/schedule/alive/change/").status_code == 200


class TestClocks:
    """Berlin goes from 02:00 to 03:00 on 29 March 2026, and from 03:00 to 02:00 on 25 October."""

    def ticks(self, cron: str, start: str, count: int) -> list[str]:
        one = made(cron=cron, timezone="Europe/Berlin")
        found, moment = [], dt.datetime.fromisoformat(start)
        for _ in range(count):
            following = one.after(moment)
            assert following is not None and following > moment
            moment = following
            found.append(moment.strftime("%d %H:%M"))
        return found

    def test_a_time_that_is_left_out_comes_right_after(self) -> None:
        found = self.ticks("30 2 * * *", "2026-03-28T00:00:00+00:00", 3)
        assert found == ["28 01:30", "29 01:00", "30 00:30"]

    def test_a_time_that_comes_twice_is_taken_once(self) -> None:
        found = self.ticks("30 2 * * *", "2026-10-24T12:00:00+00:00", 2)
        assert found == ["25 00:30", "26 01:30"]
        # A worker that starts in the second of the two hours.
        assert self.ticks("30 2 * * *", "2026-10-25T01:10:00+00:00", 1) == ["26 01:30"]

    def test_an_interval_follows_the_real_time(self) -> None:
        found = self.ticks("*/30 * * * *", "2026-10-25T00:15:00+00:00", 4)
        assert found == ["25 00:30", "25 01:00", "25 01:30", "25 02:00"]
        found = self.ticks("*/30 * * * *", "2026-03-29T00:15:00+00:00", 3)
        assert found == ["29 00:30", "29 01:00", "29 01:30"]


def test_an_entry_says_what_is_wrong() -> None:
    with pytest.raises(InvalidArgument, match="five fields"):
        made(cron="soon")
    with pytest.raises(InvalidArgument, match="Atlantis"):
        made(timezone="Europe/Atlantis")
