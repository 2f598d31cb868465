"""Cancel by filter, and the command that lists, shows, cancels, retries and prunes jobs."""

from __future__ import annotations

import datetime as dt
import io
import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, transaction
from django.db.models import Q
from django.utils import timezone

from echomq_app.exceptions import InvalidArgument, InvalidPayload
from echomq_app.jobs import control
from echomq_app.jobs.control import CancelledMany
from echomq_app.jobs.outcomes import Ending
from echomq_app.jobs.transitions import settle
from echomq_app.models import CancelRequest, Job
from tests import jobtasks
from tests.databases import refusing, session
from tests.integration.jobs import (
    USING,
    claim,
    finished,
    history,
    outcome,
    records,
    register,
    running_worker,
    stored_id,
)
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def enqueue(count: int, **options: Any) -> list[str]:
    task: Any = jobtasks.add
    return [task.using(**options).enqueue(n, n).id for n in range(count)]


class TestCancelMany:
    def test_what_waits_is_cancelled_and_what_runs_is_asked(self) -> None:
        running, *ready = enqueue(3)
        later = enqueue(1, run_after=timezone.now() + dt.timedelta(hours=1))
        other = enqueue(1, queue_name="mail")
        claim(register())
        answer = control.cancel_many(Q(queue="default"), "wrong issue", "admin")
        assert answer == CancelledMany(cancelled=3, requested=1)
        for id in (*ready, *later):
            job = Job.objects.get(pk=id)
            assert (job.state, job.cancel_reason) == ("cancelled", "wrong issue")
            type, data = records(id)[-1]
            assert type == "cancelled" and data["reason"] == "wrong issue" and data["finished_at"]
        request = CancelRequest.objects.get()
        assert (str(request.job_id), request.reason, request.kind) == (
            running,
            "wrong issue",
            "admin",
        )
        assert history(running) == ["enqueued", "started", "cancel_requested"]
        assert Job.objects.get(pk=other[0]).state == "ready"
        assert control.cancel_many(Q(queue="default")) == CancelledMany(requested=1)
        assert CancelRequest.objects.get().reason == "wrong issue"  # the first one stays

    def test_one_that_fails_stops_no_other(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(control, "MANY", 2)
        ids = enqueue(5)
        with refusing("UPDATE", "echomq_job", f"OLD.id = {stored_id(ids[1])}"):
            assert control.cancel_many(Q()) == CancelledMany(cancelled=4, failed=1)
            assert [Job.objects.get(pk=id).state for id in ids].index("ready") == 1
            assert f"doing=cancel item={ids[1]}" in caplog.text
            with pytest.raises(CommandError, match="1 jobs could not be cancelled"):
                call_command("echomq_job", "cancel", "--queue", "default")
        assert control.cancel_many(Q()) == CancelledMany(cancelled=1)

    def test_an_error_that_ends_it_says_what_was_done(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(control, "MANY", 2)
        ids = enqueue(5)
        with (
            refusing("UPDATE", "echomq_job", f"OLD.id = {stored_id(ids[3])}"),
            pytest.raises(DatabaseError) as caught,
            transaction.atomic(),
        ):
            control.cancel_many(Q())
        assert "cancelled=2" in caught.value.__notes__[0]

    def test_finished_jobs_are_left_alone(self) -> None:
        enqueue(1)
        (claimed,) = claim(register())
        settle(USING, [outcome(claimed, Ending.RETURNED)])
        assert control.cancel_many(Q()) == CancelledMany()
        assert Job.objects.get().state == "completed"

    def test_the_first_reason_stays_when_the_job_went_back(self) -> None:
        enqueue(2)
        (claimed,) = claim(register())
        control.cancel(claimed.id, "first")
        Job.objects.update(state="ready")
        assert control.cancel_many(Q(), "second") == CancelledMany(cancelled=2)
        assert Job.objects.get(pk=claimed.id).cancel_reason == "first"
        assert not CancelRequest.objects.exists()

    def test_in_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control, "MANY", 3)
        enqueue(8)
        assert control.cancel_many(Q()) == CancelledMany(cancelled=8)

    def test_in_the_callers_transaction(self) -> None:
        enqueue(2)
        with transaction.atomic():
            assert control.cancel_many(Q()).cancelled == 2
            transaction.set_rollback(True)
        assert set(Job.objects.values_list("state", flat=True)) == {"ready"}

    @pytest.mark.postgres
    def test_waits_for_no_row_that_somebody_holds(self) -> None:
        held, free = enqueue(2)
        with session() as other:
            other.execute("BEGIN")
            other.execute("SELECT 1 FROM echomq_job ORDER BY id LIMIT 1 FOR UPDATE")
            assert control.cancel_many(Q()) == CancelledMany(cancelled=1, requested=1)
            other.execute("ROLLBACK")
        assert claim(register(), 5) == []  # it won't start
        assert str(CancelRequest.objects.get().job_id) == held
        assert Job.objects.get(pk=free).state == "cancelled"

    def test_what_cannot_be_stored_is_refused(self) -> None:
        with pytest.raises(InvalidPayload):
            control.cancel_many(Q(), "nul\0")
        with pytest.raises(InvalidArgument):
            control.cancel_many(Q(), kind="")

    async def test_async(self) -> None:
        assert await control.acancel_many(Q()) == CancelledMany()

    def test_nothing_is_cancelled_before_its_handler_returned(self, tmp_path: Any) -> None:
        trace = tmp_path / "trace"
        with running_worker():
            job = jobtasks.holds_on.enqueue(str(trace))
            wait_until(trace.exists)
            assert control.cancel_many(Q(task_path="tests.jobtasks.holds_on")).requested == 1
            wait_until(lambda: "seen" in trace.read_text())
            assert Job.objects.get(pk=job.id).state == "running"
            (tmp_path / "trace.go").touch()
            assert finished(job.id).state == "cancelled"


def run(*arguments: str) -> Any:
    out = io.StringIO()
    call_command("echomq_job", *arguments, "--format", "json", stdout=out)
    return json.loads(out.getvalue())


class TestCommand:
    def test_list_and_show(self) -> None:
        first, second = enqueue(2)
        mail, *_ = enqueue(1, queue_name="mail", group="g")
        assert [row["id"] for row in run("list")] == [mail, second, first]
        assert [row["id"] for row in run("list", "--queue", "mail")] == [mail]
        assert [row["id"] for row in run("list", "--group", "g")] == [mail]
        assert [row["id"] for row in run("list", "--limit", "1")] == [mail]
        assert run("list", "--state", "failed") == []
        shown = run("show", second)
        assert shown["arguments"] == {"args": [1, 1], "kwargs": {}} and shown["state"] == "ready"

    def test_cancel_and_retry(self) -> None:
        first, second = enqueue(2)
        assert run("cancel", first, "--reason", "no") == [{"id": first, "answer": "cancelled"}]
        assert run("cancel", "--task", "tests.jobtasks.add") == {
            "cancelled": 1,
            "requested": 0,
            "finished": 0,
            "failed": 0,
        }
        assert run("show", first)["reason"] == "no"
        assert [row["answer"] for row in run("retry", first, second)] == ["retried", "retried"]

    def test_prune(self) -> None:
        first, second = enqueue(2)
        control.cancel(first)
        assert run("prune", "--older-than", "1h") == {"deleted": 0}
        Job.objects.filter(pk=first).update(finished_at=timezone.now() - dt.timedelta(hours=2))
        assert run("prune", "--older-than", "1h") == {"deleted": 1}
        assert str(Job.objects.get().pk) == second

    @pytest.mark.parametrize(
        ("arguments", "code"),
        [
            (("cancel",), 2),
            (("cancel", "JOB00000000000000000000000000", "--queue", "x"), 2),
            (("show", "EVT00000000000000000000000000"), 2),
            (("show", "JOB00000000000000000000000000"), 1),
        ],
    )
    def test_exit_codes(self, arguments: tuple[str, ...], code: int) -> None:
        with pytest.raises(CommandError) as caught:
            run(*arguments)
        assert caught.value.returncode == code
