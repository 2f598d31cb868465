"""Paused queues, and what a probe is told."""

from __future__ import annotations

import datetime as dt
import io
import json
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from echomq_app.core.ids import new_job_id
from echomq_app.exceptions import InvalidName
from echomq_app.jobs import control, health
from echomq_app.models import Job, Outbox, Queue, Schedule, Worker
from tests import jobtasks
from tests.integration.jobs import claim, finished, register, running_worker
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


class TestPause:
    def test_nothing_is_claimed_until_it_is_resumed(self) -> None:
        worker = register()
        jobtasks.add.enqueue(1, 2)
        jobtasks.add.using(queue_name="mail").enqueue(1, 2)
        assert control.pause("default", "stock-taking") and not control.pause("default", "again")
        (one,) = control.paused()
        assert (one.name, one.reason) == ("default", "stock-taking")
        assert claim(worker, 5) == [] and len(claim(worker, 5, queue="mail")) == 1
        assert control.resume("default") and not control.resume("default")
        assert control.paused() == [] and len(claim(worker, 5)) == 1

    def test_in_the_callers_transaction(self) -> None:
        with transaction.atomic():
            control.pause("default")
            transaction.set_rollback(True)
        assert control.paused() == []

    def test_a_drain_leaves_what_is_paused_and_says_so(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        held, done = jobtasks.add.enqueue(1, 2), jobtasks.add.using(queue_name="mail").enqueue(1, 2)
        for queue in ("default", "empty"):
            control.pause(queue)
        with running_worker(queues=("default", "mail", "empty"), drain=True) as worker:
            wait_until(lambda: worker._stop.closed, 30, "the worker has ended by itself")
        states = [Job.objects.get(pk=result.id).state for result in (held, done)]
        assert states == ["ready", "completed"]
        told = [line for line in caplog.messages if "not_drained" in line]
        assert told == ["event=paused_queue_not_drained queue=default"]

    async def test_async(self) -> None:
        assert await control.apause("default")
        assert [queue.name for queue in await control.apaused()] == ["default"]
        assert await control.aresume("default")

    def test_a_name_that_cannot_be_one_is_refused(self) -> None:
        for verb in (control.pause, control.resume):
            with pytest.raises(InvalidName):
                verb("no queue")

    def test_running_jobs_go_on_and_workers_of_all_kinds_stop(self, tmp_path: Any) -> None:
        trace = str(tmp_path / "trace")
        with running_worker(queues=("default", "mail")):
            running = jobtasks.holds_on.enqueue(trace)
            wait_until(lambda: Job.objects.get(pk=running.id).state == "running")
            control.pause("default")
            # A claim may have been under way; those that begin now find nothing.
            waits = jobtasks.add.enqueue(1, 2)
            other = jobtasks.add.using(queue_name="mail").enqueue(1, 2)
            assert finished(other.id).state == "completed"
            (tmp_path / "trace.go").touch()
            control.cancel(running.id)
            assert finished(running.id).state == "cancelled"
            assert Job.objects.get(pk=waits.id).state == "ready"
            control.resume("default")
            assert finished(waits.id).state == "completed"
        assert set(Queue.objects.values_list("pk", flat=True)) >= {"default", "mail"}

    def test_command(self) -> None:
        def run(*arguments: str) -> Any:
            out = io.StringIO()
            call_command("echomq_queue", *arguments, "--format", "json", stdout=out)
            return json.loads(out.getvalue())

        assert run("pause", "mail", "--reason", "why not") == {"queue": "mail", "changed": True}
        assert run("pause", "mail")["changed"] is False
        (row,) = run("list")
        assert row["queue"] == "mail" and row["paused_at"] and row["reason"] == "why not"
        assert run("resume", "mail")["changed"] is True
        with pytest.raises(CommandError) as caught:
            run("pause", "no queue")
        assert caught.value.returncode == 2


class TestAdmin:
    def client(self, *codenames: str) -> Client:
        user = User.objects.create_user("staff", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        client = Client()
        client.force_login(user)
        return client

    def post(self, client: Client, action: str) -> str:
        data = {"action": action, "_selected_action": ["mail"]}
        answer = client.post("/admin/echomq/queue/", data, follow=True)
        return answer.content.decode()

    def test_pause_and_resume(self) -> None:
        Queue.objects.create(name="mail")
        client = self.client("view_queue", "change_queue")
        assert "was paused." in self.post(client, "pause_selected")
        assert control.paused()[0].reason == "paused by staff"
        page = client.get("/admin/echomq/queue/mail/change/").content.decode()
        assert "Paused" in page and "paused by staff" in page
        assert "was resumed." in self.post(client, "resume_selected")
        assert control.paused() == []

    def test_who_may_only_view_can_not(self) -> None:
        Queue.objects.create(name="mail")
        self.post(self.client("view_queue"), "pause_selected")
        assert control.paused() == []

    def test_schedules(self) -> None:
        client = self.client("view_schedule")
        Schedule.objects.create(
            name="nightly",
            task_path="shop.tasks.report",
            cron="0 2 * * *",
            timezone="UTC",
            next_at=timezone.now(),
            last_at=timezone.now(),
            last_job_id=new_job_id(),
        )
        Schedule.objects.create(
            name="bad", task_path="x.y", cron="* * * * *", timezone="UTC", last_error="No <module>"
        )
        page = client.get("/admin/echomq/schedule/").content.decode()
        assert "shop.tasks.report" in page and "JOB" in page and "Not enqueued" in page
        page = client.get("/admin/echomq/schedule/bad/change/").content.decode()
        assert "No &lt;module&gt;" in page


def probe(*arguments: str) -> tuple[int, dict[str, Any]]:
    out = io.StringIO()
    code = 0
    try:
        call_command("echomq_health", *arguments, stdout=out)
    except CommandError as error:
        code = error.returncode
    (line,) = out.getvalue().splitlines()
    return code, json.loads(line)


class TestHealth:
    def test_all_is_well(self) -> None:
        worker = register()
        code, said = probe("--min-workers", "1", "--max-age", "1m", "--worker", worker.name)
        assert (code, said["ok"], said["problems"]) == (0, True, [])
        assert (said["database"], said["migrations"], said["outbox"]) == ("ok", [], 0)
        assert said["queues"] == {"default": {"workers": 1, "paused": False, "oldest_ready": None}}

    @pytest.mark.parametrize("ended", ["lost_at", "stopped_at", "expires_at"])
    def test_workers_that_do_not_live(self, ended: str) -> None:
        register()
        past = timezone.now() - dt.timedelta(seconds=1)
        Worker.objects.update(**{ended: past})
        assert probe("--queue", "default")[0] == 0
        assert probe("--queue", "default", "--min-workers", "1")[0] == 1
        code, said = probe("--worker", "w1")
        assert code == 1 and "w1" in said["problems"][0]

    @pytest.mark.parametrize("state", ["ready", "scheduled"])
    def test_a_job_that_waits_for_too_long(self, state: str) -> None:
        jobtasks.add.enqueue(1, 2)
        old = timezone.now() - dt.timedelta(minutes=10)
        Job.objects.update(run_after=old, state=state)
        assert probe("--queue", "default", "--max-age", "1h")[0] == 0
        code, said = probe("--queue", "default", "--max-age", "5m")
        assert code == 1 and 600 <= said["queues"]["default"]["oldest_ready"] < 900
        control.pause("default")
        code, said = probe("--queue", "default", "--max-age", "5m")
        assert code == 0 and said["queues"]["default"]["paused"]

    def test_the_oldest_is_found_by_a_step_for_each_priority(self) -> None:
        """A queue may have a million ready jobs: no look at each."""
        for priority in (-1, 0, 5):
            task = jobtasks.add.using(priority=priority)
            for _ in range(5):
                task.enqueue(1, 2)
        oldest = Job.objects.filter(priority=0).last()
        assert oldest is not None
        at = timezone.now() - dt.timedelta(minutes=10)
        Job.objects.filter(pk=oldest.pk).update(run_after=at)
        with CaptureQueriesContext(connection) as queries:
            _, said = probe("--queue", "default")
        assert 600 <= said["queues"]["default"]["oldest_ready"] < 900
        looks = [query["sql"] for query in queries if "run_after" in query["sql"]]
        assert len(looks) == 3 + 1 + 1 and all("LIMIT 1" in look for look in looks[1:])
        assert "MIN" in looks[0] and "scheduled" in looks[0]

    @pytest.mark.postgres
    def test_backlog(self) -> None:
        for n in range(3):
            Outbox.objects.create(stream="emq.default", record={"data": n})
        assert probe("--max-backlog", "3")[0] == 0
        assert probe("--max-backlog", "2")[0] == 1

    def test_missing_migrations(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "DELETE FROM django_migrations WHERE app = 'echomq' AND name = '0004_outbox_keys'"
            )
        try:
            code, said = probe()
            assert code == 1 and said["migrations"] == ["0004_outbox_keys"] and "queues" not in said
        finally:
            with connection.cursor() as cursor:
                cursor.execute(
                    "INSERT INTO django_migrations (app, name, applied)"
                    " VALUES ('echomq', '0004_outbox_keys', '2026-01-01')"
                )

    def test_no_database(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*args: object) -> None:
            raise DatabaseError("connection refused\nis it running?")

        monkeypatch.setattr(health, "_missing", broken)
        code, said = probe()
        assert code == 1 and said["database"] == "connection refused is it running?"

    def test_usage(self) -> None:
        with pytest.raises(CommandError) as caught:
            call_command("echomq_health", "--queue", "no queue")
        assert caught.value.returncode == 2
