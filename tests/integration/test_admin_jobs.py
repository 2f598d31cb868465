"""The admin of jobs and workers: what it shows, and the actions that it hands on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from echomq_app.admin import jobs as jobs_module
from echomq_app.core.ids import new_job_id
from echomq_app.jobs import control
from echomq_app.jobs.worker import Worker as JobWorker
from echomq_app.jobs.worker_options import WorkerOptions
from echomq_app.models import CancelRequest, Job, JobState, Worker
from echomq_app.stream import Stream
from tests import jobtasks

pytestmark = pytest.mark.django_db(transaction=True)

JOBS = "/admin/echomq/job/"


@pytest.fixture
def sql() -> Iterator[CaptureQueriesContext]:
    """Watch all statements, and refuse those that get slow with the tables' size."""
    with CaptureQueriesContext(connection) as captured:
        yield captured
    for statement in (query["sql"] for query in captured if '"echomq_job"' in query["sql"]):
        assert not re.search(r"\bOFFSET\b", statement, re.I), statement
        assert not re.match(r"SELECT COUNT", statement, re.I), statement


@pytest.fixture
def staff() -> Callable[..., Client]:
    """Give a function that logs in a staff user with these permissions."""

    def log_in(*codenames: str) -> Client:
        user = User.objects.create_user(f"user{User.objects.count()}", is_staff=True)
        user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
        client = Client()
        client.force_login(user)
        return client

    return log_in


def stored(count: int, **fields: Any) -> list[Job]:
    """Write jobs as they would stand there: many, and in any state."""
    now = timezone.now()
    return Job.objects.bulk_create(
        Job(
            **{
                "id": new_job_id(),
                "queue": "default",
                "task_path": "tests.jobtasks.add",
                "arguments": {"args": [1, 2], "kwargs": {}},
                "run_after": now,
                "enqueued_at": now,
                **fields,
            }
        )
        for _ in range(count)
    )


def running(job_id: str) -> Job:
    """Have a worker hold the job."""
    worker = Worker.objects.register(
        name="host:1", host="host", pid=1, queues=["default"], concurrency=2, lease=60
    )
    now = timezone.now()
    Job.objects.filter(pk=job_id).update(
        state=JobState.RUNNING, worker=worker, worker_name=worker.name, fence=1, attempt=1,
        started_at=now, attempted_at=now,
    )  # fmt: skip
    return Job.objects.get(pk=job_id)


def drain() -> None:
    JobWorker(WorkerOptions(queues=("default",), drain=True)).run()


def listed(client: Any, query: str = "") -> list[Any]:
    response = client.get(JOBS + query)
    assert response.status_code == 200
    return [job.pk for job in response.context["cl"].result_list]


def page(client: Any, job_id: Any) -> str:
    response = client.get(f"{JOBS}{job_id}/change/")
    assert response.status_code == 200
    text: str = response.content.decode()
    return text


def messages(response: Any) -> list[str]:
    return [str(message) for message in response.context["messages"]]


class TestList:
    def test_pages_hold_each_job_once_newest_first(
        self, admin_client: Any, sql: CaptureQueriesContext
    ) -> None:
        jobs = stored(120)
        ids: list[Any] = []
        url: str | None = ""
        while url is not None:
            response = admin_client.get(JOBS + url)
            ids += [job.pk for job in response.context["cl"].result_list]
            url = response.context["cl"].below_url
        assert ids == sorted((job.pk for job in jobs), reverse=True)

    def test_statements_do_not_grow_with_the_jobs(
        self, admin_client: Any, sql: CaptureQueriesContext
    ) -> None:
        stored(1)
        with CaptureQueriesContext(connection) as few:
            listed(admin_client)
        stored(49)
        with CaptureQueriesContext(connection) as many:
            assert len(listed(admin_client)) == 50
        assert len(few) == len(many) <= 4

    def test_filters(self, admin_client: Any, sql: CaptureQueriesContext) -> None:
        by_state = {state.value: stored(2, state=state) for state in JobState}
        mail = stored(1, queue="mail", task_path="shop.tasks.send_receipt")
        for state, jobs in by_state.items():
            expected = {job.pk for job in jobs + (mail if state == "ready" else [])}
            assert set(listed(admin_client, f"?state={state}")) == expected
        assert listed(admin_client, "?queue=mail") == [mail[0].pk]
        assert listed(admin_client, "?task=RECEIPT") == [mail[0].pk]
        assert listed(admin_client, "?task=receipt&state=failed") == []
        assert listed(admin_client, "?state=asleep") == []

    def test_a_rare_filter_is_looked_for_in_bounded_steps(
        self, admin_client: Any, monkeypatch: pytest.MonkeyPatch, sql: CaptureQueriesContext
    ) -> None:
        monkeypatch.setattr(jobs_module, "_WINDOW", 30)
        rare = stored(1, queue="mail")
        stored(100)
        found: list[Any] = []
        url: str | None = "?queue=mail"
        steps = 0
        while url is not None:
            response = admin_client.get(JOBS + url)
            found += [job.pk for job in response.context["cl"].result_list]
            url, steps = response.context["cl"].below_url, steps + 1
        assert (found, steps) == ([rare[0].pk], 4)

    def test_large_columns_are_not_read(self, admin_client: Any) -> None:
        stored(3, errors=[{"traceback": "x" * 1_000}], result="y" * 1_000)
        with CaptureQueriesContext(connection) as captured:
            listed(admin_client)
        (statement,) = (q["sql"] for q in captured if '"echomq_job"' in q["sql"])
        for column in ("arguments", "result", "errors", "cancel_reason"):
            assert f'"{column}"' not in statement

    def test_go_to_a_job(self, admin_client: Any) -> None:
        (job,) = stored(1)
        assert admin_client.get(JOBS, {"go": f" {job.pk} "}).url == f"{JOBS}{job.pk}/change/"
        for text, says in (
            (str(new_job_id()), "There is no job"),
            ("EVT" + "0" * 26, "starts with"),
            ("nonsense", "starts with"),
        ):
            assert says in admin_client.get(JOBS, {"go": text}).content.decode()


class TestJobPage:
    def test_tells_the_story_of_one_that_failed(
        self, admin_client: Any, sql: CaptureQueriesContext
    ) -> None:
        id = jobtasks.fail.enqueue("it was <b>wrong</b>").id
        drain()
        response = admin_client.get(f"{JOBS}{id}/change/")
        steps = [(step["type"], step["details"]) for step in response.context["timeline"]]
        assert [step[0] for step in steps] == [
            "enqueued",
            *["started", "retrying"] * 2,
            "started",
            "failed",
        ]
        assert "ValueError: it was <b>wrong</b>" in steps[-1][1]
        text = response.content.decode()
        assert text.count("Traceback (most recent call last)") == 3
        assert "<b>wrong" not in text and "&lt;b&gt;wrong&lt;/b&gt;" in text
        assert "3 of 3" in text and "Retry…" in text and "Cancel…" not in text

    def test_shows_arguments_result_and_progress(self, admin_client: Any) -> None:
        id = jobtasks.echo.enqueue({"deep": [1, None]}).id
        drain()
        text = page(admin_client, id)
        assert text.count("&quot;deep&quot;: [") == 2 and "Retry…" not in text
        Job.objects.filter(pk=id).update(progress=0.42, progress_note="halfway <b>")
        text = page(admin_client, id)
        assert '<progress value="0.4200" max="1">42%</progress> 42% halfway &lt;b&gt;' in text

    def test_a_result_of_null_is_a_result(self, admin_client: Any) -> None:
        id = jobtasks.echo.enqueue(None).id
        drain()
        assert '<pre class="echomq-pre">null</pre>' in page(admin_client, id)

    def test_waiting_request_to_cancel(self, admin_client: Any) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        running(id)
        assert control.cancel(id, "enough <b>") == "requested"
        assert "enough &lt;b&gt;" in page(admin_client, id)

    def test_who_cancelled_it_and_what_group_it_waits_for(self, admin_client: Any) -> None:
        (parked,) = stored(1, group_key="group:customer:7", group_limit=1, parked=True)
        (cancelled,) = stored(1, state="cancelled", cancel_kind="deploy")
        (plain,) = stored(1, group_key="task:tests.jobtasks.add", group_limit=2)
        assert len(listed(admin_client)) == 3
        rows = admin_client.get(JOBS).content.decode()
        for text in (rows, page(admin_client, parked.pk)):
            assert "customer:7" in text and "parked: the group is full" in text
        for text in (rows, page(admin_client, cancelled.pk)):
            assert "deploy" in text
        shown = page(admin_client, plain.pk)
        assert "parked" not in shown and "deploy" not in shown

    def test_one_whose_task_and_worker_are_gone(self, admin_client: Any) -> None:
        (job,) = stored(1, task_path="gone.tasks.never", worker_id=99, worker_name="gone:1")
        assert "gone.tasks.never" in page(admin_client, job.pk)
        assert listed(admin_client) == [job.pk]

    def test_without_any_record(self, admin_client: Any) -> None:
        (job,) = stored(1)
        assert "holds no record of this job" in page(admin_client, job.pk)

    def test_the_newest_steps_of_very_many(
        self, admin_client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jobs_module, "_TIMELINE", 3)
        id = jobtasks.fail.enqueue("no").id
        drain()
        timeline = admin_client.get(f"{JOBS}{id}/change/").context["timeline"]
        assert [step["type"] for step in timeline] == ["retrying", "started", "failed"]


class TestCancel:
    def test_from_the_list_with_a_reason_and_an_audit_row_each(self, admin_client: Any) -> None:
        waiting = jobtasks.add.enqueue(1, 2).id
        runs = jobtasks.add.enqueue(3, 4).id
        (over,) = stored(1, state=JobState.COMPLETED)
        running(runs)
        chosen = {"action": "cancel_selected", "_selected_action": [waiting, runs, str(over.pk)]}
        response = admin_client.post(f"{JOBS}?queue=default", {**chosen, "index": "0"})
        assert response.status_code == 302 and urlsplit(response.url).path == f"{JOBS}cancel/"
        confirm = response.url
        text = admin_client.get(confirm).content.decode()
        assert waiting in text and runs in text and "Cancel these 3 jobs?" in text
        assert Job.objects.get(pk=waiting).state == JobState.READY  # nothing done yet

        response = admin_client.post(confirm, {"reason": "the shop is closed"})
        assert response.url == f"{JOBS}?queue=default"
        assert messages(admin_client.get(response.url)) == [
            "1 job was finished already.",
            "1 job runs; its handler was asked to stop.",
            "1 job was cancelled.",
        ]
        first = Job.objects.get(pk=waiting)
        assert (first.state, first.cancel_reason) == (JobState.CANCELLED, "the shop is closed")
        request = CancelRequest.objects.get()
        assert (str(request.job_id), request.reason) == (runs, "the shop is closed")
        assert request.kind == "admin"
        assert Job.objects.get(pk=over.pk).state == JobState.COMPLETED
        audit = {
            entry.object_id: (entry.action_flag, entry.change_message, entry.user.get_username())
            for entry in LogEntry.objects.all()
        }
        assert audit[waiting] == (CHANGE, "cancel: cancelled (the shop is closed)", "admin")
        assert audit[runs] == (CHANGE, "cancel: requested (the shop is closed)", "admin")
        assert len(audit) == 3

    def test_from_a_jobs_page(self, admin_client: Any) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        found = re.search(r'href="([^"]*/cancel/[^"]*)"', page(admin_client, id))
        assert found
        url = found[1].replace("&amp;", "&")
        assert "Cancel this job?" in admin_client.get(url).content.decode()
        response = admin_client.post(url, {"reason": ""})
        assert response.url.startswith(f"{JOBS}{id}/change/")
        text = admin_client.get(response.url).content.decode()
        assert "1 job was cancelled." in text and "Retry…" in text
        assert [record.type for record in self.history()] == ["enqueued", "cancelled"]
        assert "cancel: cancelled" in admin_client.get(f"{JOBS}{id}/history/").content.decode()

    def history(self) -> list[Any]:
        stream = Stream("emq.default")
        stream.relay()
        return stream.read().records

    def test_reason_that_cannot_be_stored_does_nothing(self, admin_client: Any) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        url = f"{JOBS}cancel/?id={id}"
        for reason in ("nul\0", "x" * 2_001):
            response = admin_client.post(url, {"reason": reason})
            assert response.status_code == 200 and response.context["form"].errors
        assert Job.objects.get(pk=id).state == JobState.READY

    def test_a_running_handler_is_told(self, admin_client: Any) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        running(id)
        admin_client.post(f"{JOBS}cancel/?id={id}", {"reason": "first"})
        admin_client.post(f"{JOBS}cancel/?id={id}", {"reason": "second"})
        assert CancelRequest.objects.get().reason == "first"

    @pytest.mark.parametrize(
        "query", ["", "?id=nonsense", "?id=EVT" + "0" * 26, "?id=JOB" + "0" * 26]
    )
    def test_no_such_job(self, admin_client: Any, query: str) -> None:
        assert admin_client.get(f"{JOBS}cancel/{query}").status_code == 404

    def test_at_most_so_many_at_a_time(
        self, admin_client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("echomq_app.admin.job_actions.MOST", 3)
        jobs = stored(4)
        data = {"action": "cancel_selected", "_selected_action": [str(job.pk) for job in jobs]}
        response = admin_client.post(JOBS, {**data, "index": "0"}, follow=True)
        assert messages(response) == ["Select at most 3 jobs at a time."]
        data = {"action": "cancel_selected", "select_across": "1", "_selected_action": "x"}
        assert admin_client.post(JOBS, {**data, "index": "0"}, follow=True).status_code == 200
        assert Job.objects.filter(state=JobState.READY).count() == 4


class TestRetry:
    def test_failed_and_cancelled_jobs_run_again_others_do_not(self, admin_client: Any) -> None:
        failed, cancelled = jobtasks.fail.enqueue("no").id, jobtasks.add.enqueue(1, 2).id
        done = jobtasks.add.enqueue(3, 4).id
        control.cancel(cancelled, "a mistake")
        drain()
        waits = jobtasks.add.enqueue(5, 6).id
        query = "&".join(f"id={id}" for id in (failed, cancelled, done, waits))
        text = admin_client.get(f"{JOBS}retry/?{query}").content.decode()
        assert "Let these 4 jobs run again?" in text and "<textarea" not in text
        response = admin_client.post(f"{JOBS}retry/?{query}", follow=True)
        assert sorted(messages(response)) == [
            "1 job has completed and isn't run twice.",
            "1 job waits or runs already.",
            "2 jobs are ready to run again.",
        ]
        ready = set(map(str, Job.objects.filter(state="ready").values_list("pk", flat=True)))
        assert ready == {failed, cancelled, waits}
        drain()
        assert Job.objects.get(pk=cancelled).result == 3
        said = LogEntry.objects.filter(object_id=failed).values_list("change_message", flat=True)
        assert list(said) == ["retry: retried"]


class TestPermissions:
    def test_who_may_only_look_sees_no_actions_and_can_do_nothing(
        self, staff: Callable[..., Client]
    ) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        viewer: Any = staff("view_job")
        assert b"cancel_selected" not in viewer.get(JOBS).content
        assert "Cancel…" not in page(viewer, id)
        data = {"action": "cancel_selected", "_selected_action": id, "index": "0"}
        assert viewer.post(JOBS, data).status_code == 200  # the list again: there is no action
        for verb in ("cancel", "retry"):
            assert viewer.get(f"{JOBS}{verb}/?id={id}").status_code == 403
            assert viewer.post(f"{JOBS}{verb}/?id={id}").status_code == 403
        assert Job.objects.get(pk=id).state == JobState.READY

    def test_who_may_change_jobs_can_cancel_and_still_edits_nothing(
        self, staff: Callable[..., Client]
    ) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        operator = staff("change_job")
        assert b"cancel_selected" in operator.get(JOBS).content
        assert operator.post(f"{JOBS}{id}/change/", {"queue": "x"}).status_code == 403
        assert operator.get(f"{JOBS}{id}/delete/").status_code == 403
        assert operator.post(f"{JOBS}cancel/?id={id}", {"reason": ""}).status_code == 302
        assert Job.objects.get(pk=id).state == JobState.CANCELLED

    def test_nobody_else(self, staff: Callable[..., Client], client: Client) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        assert staff().get(f"{JOBS}cancel/?id={id}").status_code == 403
        assert client.get(f"{JOBS}cancel/?id={id}").status_code == 302  # to the login
        outsider = Client(enforce_csrf_checks=True)
        outsider.force_login(User.objects.create_superuser("root"))
        assert outsider.post(f"{JOBS}cancel/?id={id}", {"reason": ""}).status_code == 403


class TestWorkers:
    URL = "/admin/echomq/worker/"

    def test_list_and_page(self, admin_client: Any) -> None:
        first, second = (jobtasks.add.enqueue(1, 2).id for _ in range(2))
        running(first), running(second)
        old, new = Worker.objects.order_by("pk")
        Worker.objects.stop(old.pk)
        with CaptureQueriesContext(connection) as two:
            text = admin_client.get(self.URL).content.decode()
        assert "Alive" in text and "Stopped" in text and text.count("1 of 2") == 2
        shown = admin_client.get(self.URL + "?alive=on").context["cl"].result_list
        assert [worker.pk for worker in shown] == [new.pk]
        text = admin_client.get(f"{self.URL}{new.pk}/change/").content.decode()
        assert second in text and first not in text
        for _ in range(5):
            running(second)
        with CaptureQueriesContext(connection) as seven:
            admin_client.get(self.URL)
        assert len(two) == len(seven)

    def test_one_that_is_lost_or_silent(self, admin_client: Any) -> None:
        running(jobtasks.add.enqueue(1, 2).id)
        Worker.objects.update(expires_at=timezone.now())
        assert "Lease expired" in admin_client.get(self.URL).content.decode()
        with transaction.atomic():
            Worker.objects.lose_expired()
        assert "Lost" in admin_client.get(self.URL).content.decode()
