"""Cancel and retry: what is answered, and every race with the worker."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from django.db import connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from echomq_app.core.ids import JobId, new_job_id
from echomq_app.exceptions import InvalidArgument, InvalidPayload, UnknownJob, WrongBrand
from echomq_app.jobs import cancelling, control, housekeeping
from echomq_app.jobs.housekeeping import sweep
from echomq_app.jobs.outcomes import Ending, error_record
from echomq_app.jobs.transitions import settle
from echomq_app.models import CancelRequest, Job, Worker
from echomq_app.models.times import now
from tests import jobtasks
from tests.databases import concurrently, end, refusing
from tests.integration.jobs import (
    USING,
    claim,
    hearing,
    history,
    outcome,
    records,
    register,
    stored_id,
)

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def worker() -> Worker:
    return register()


@pytest.fixture
def other() -> Iterator[BaseDatabaseWrapper]:
    """Give a second connection, for a transaction that stays open."""
    connection = connections[USING].copy()
    yield connection
    end(connection)


def hold(other: BaseDatabaseWrapper, id: str) -> None:
    with other.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT 1 FROM echomq_job WHERE id = %s FOR UPDATE", (JobId.parse(id).hex,))


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Make calls in threads that begin together; return their results."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        try:
            barrier.wait()
            return call()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


class TestAnswers:
    def test_waiting_job_is_cancelled_at_once(self) -> None:
        later = timezone.now() + dt.timedelta(hours=1)
        ready = jobtasks.add.enqueue(1, 2).id
        scheduled = jobtasks.add.using(run_after=later).enqueue(1, 2).id
        for id in (ready, scheduled):
            with hearing() as heard:
                assert control.cancel(id, "enough") == "cancelled"
                job = Job.objects.get(pk=id)
                assert (job.state, job.cancel_reason) == ("cancelled", "enough")
                event, data = records(id)[-1]
                assert [(e.event, e.data) for e in heard.so_far()] == [(event, data)]
            assert event == "cancelled"
            assert (data["id"], data["state"], data["reason"]) == (id, "cancelled", "enough")
            assert data["attempt"] == 0 and data["finished_at"]

    def test_running_job_is_asked_and_the_first_reason_stays(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        claim(worker)
        with hearing() as heard:
            assert control.cancel(id, "first", kind="admin") == "requested"
            assert control.cancel(id, "second") == "requested"
            assert heard.names() == ["cancel_requested"]
        request = CancelRequest.objects.get()
        assert (request.reason, request.kind) == ("first", "admin")
        assert Job.objects.get(pk=id).state == "running"
        assert history(id) == ["enqueued", "started", "cancel_requested"]

    def test_first_reason_stays_when_the_job_went_back_to_the_queue(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        (claimed,) = claim(worker)
        assert control.cancel(id, "first") == "requested"
        settle(USING, [outcome(claimed, Ending.HANDED_BACK)])
        assert control.cancel(id, "second") == "cancelled"
        assert Job.objects.get(pk=id).cancel_reason == "first"
        assert records(id)[-1][1]["reason"] == "first"
        assert not CancelRequest.objects.exists()

    @pytest.mark.parametrize("ending", [Ending.RETURNED, Ending.STOPPED])
    def test_finished_job_is_not_changed(self, worker: Worker, ending: Ending) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        settle(USING, [outcome(claim(worker)[0], ending)])
        before = Job.objects.filter(pk=id).values().get()
        assert control.cancel(id, "too late") == "finished"
        assert Job.objects.filter(pk=id).values().get() == before
        assert not CancelRequest.objects.exists()

    def test_unknown_job_and_wrong_id_leave_the_transaction_usable(self) -> None:
        with transaction.atomic():
            with pytest.raises(UnknownJob):
                control.cancel(str(new_job_id()))
            with pytest.raises(WrongBrand):
                control.cancel("EVT00000000000000000000000000")
            with pytest.raises(UnknownJob):
                control.retry(new_job_id())
            id = jobtasks.add.enqueue(1, 2).id
        assert control.cancel(JobId.parse(id)) == "cancelled"

    def test_reasons(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        claim(worker)
        with pytest.raises(InvalidPayload, match="NUL"):
            control.cancel(id, "a\0b")
        with pytest.raises(InvalidPayload, match="limit"):
            control.cancel(id, "x" * 100_000)
        with pytest.raises(InvalidArgument, match="kind"):
            control.cancel(id, kind="")
        for wrong in ({"reason": 5}, {"kind": 5}, {"kind": "a\0"}, {"reason": "\ud800"}):
            with pytest.raises(InvalidPayload):
                control.cancel(id, **wrong)
        long = "é" * 10_000  # 20 kB
        assert control.cancel(id, long) == "requested"
        assert CancelRequest.objects.get().reason == long
        assert records(id)[-1][1]["reason"] == long

    async def test_async(self) -> None:
        result = await jobtasks.add.aenqueue(1, 2)
        assert await control.acancel(result.id) == "cancelled"
        assert await control.aretry(result.id) == "retried"

    def test_rollback_takes_it_back(self) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        with hearing() as heard:
            with transaction.atomic():
                assert control.cancel(id) == "cancelled"
                transaction.set_rollback(True)
            assert Job.objects.get(pk=id).state == "ready"
            assert history(id) == ["enqueued"] and heard.so_far() == []


class TestRaces:
    def test_cancel_against_claim_one_of_them_wins(self, worker: Worker) -> None:
        """Many times at once: what was answered `cancelled` never started."""
        for _ in range(20):
            id = jobtasks.add.enqueue(1, 2).id
            claimed, answer = at_once(lambda: claim(worker), partial(control.cancel, id, "race"))
            job = Job.objects.get(pk=id)
            if answer == "cancelled":
                assert job.state == "cancelled" and job.attempt == 0 and claimed == []
            else:
                # Claimed; or its row was held by the claim that came to nothing for it.
                assert answer == "requested"
                assert CancelRequest.objects.filter(job=job).exists()
                assert job.state == "running" or claim(worker) == []
            Job.objects.all().delete()
            CancelRequest.objects.all().delete()

    def test_request_that_meets_a_job_on_its_way_back_holds(self, worker: Worker) -> None:
        """The request is committed just after the job went back: it isn't claimed again."""
        id = jobtasks.add.enqueue(1, 2).id
        (claimed,) = claim(worker)
        error = error_record(ValueError("no"), attempt=1, worker="w1", at=now())
        settle(USING, [outcome(claimed, Ending.RAISED, error=error, options={"backoff": 0})])
        CancelRequest.objects.create(job_id=id, reason="late", requested_at=timezone.now())
        assert Job.objects.get(pk=id).state == "ready" and claim(worker) == []
        sweep(USING)
        job = Job.objects.get(pk=id)
        assert (job.state, job.cancel_reason, job.attempt) == ("cancelled", "late", 1)
        assert not CancelRequest.objects.exists()
        assert history(id)[-1] == "cancelled"

    def test_one_that_cannot_be_cancelled_stops_no_other(
        self, worker: Worker, caplog: pytest.LogCaptureFixture
    ) -> None:
        ids = [jobtasks.add.enqueue(1, number).id for number in range(3)]
        for id in ids:
            CancelRequest.objects.create(job_id=id, reason="late", requested_at=timezone.now())
        with refusing("UPDATE", "echomq_job", f"OLD.id = {stored_id(ids[0])}"):
            sweep(USING)
        states = [Job.objects.get(pk=id).state for id in ids]
        assert states == ["ready", "cancelled", "cancelled"]
        assert f"doing=sweep item={ids[0]}" in caplog.text

    def test_request_for_a_job_that_has_ended_is_forgotten(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        settle(USING, [outcome(claim(worker)[0])])
        CancelRequest.objects.create(job_id=id, reason="late", requested_at=timezone.now())
        sweep(USING)
        assert not CancelRequest.objects.exists()
        assert Job.objects.get(pk=id).state == "completed"

    @pytest.mark.postgres
    @pytest.mark.parametrize(
        ("ending", "answer", "last"),
        [
            (Ending.RETURNED, "finished", "completed"),
            (Ending.HANDED_BACK, "cancelled", "cancelled"),
        ],
    )
    def test_a_job_that_ends_while_it_is_being_asked(
        self,
        worker: Worker,
        monkeypatch: pytest.MonkeyPatch,
        ending: Ending,
        answer: str,
        last: str,
    ) -> None:
        """After the first look, and before the request is written."""
        id = jobtasks.add.enqueue(1, 2).id
        (claimed,) = claim(worker)
        insert = cancelling._insert_request

        def late(*request: Any) -> bool:
            concurrently(lambda: settle(USING, [outcome(claimed, ending)]))
            return insert(*request)

        monkeypatch.setattr(cancelling, "_insert_request", late)
        assert control.cancel(id, "late") == answer
        assert history(id)[-1] == last and "cancel_requested" not in history(id)
        assert Job.objects.get(pk=id).state == last
        assert not CancelRequest.objects.exists()

    @pytest.mark.postgres
    def test_row_that_somebody_holds_is_not_waited_for(
        self, worker: Worker, other: BaseDatabaseWrapper
    ) -> None:
        waiting = jobtasks.add.enqueue(1, 2).id
        hold(other, waiting)
        assert control.cancel(waiting, "now") == "requested"
        assert claim(worker) == []
        end(other)  # it rolls back: the job is ready, and somebody has asked
        assert claim(worker) == []
        sweep(USING)
        assert Job.objects.get(pk=waiting).state == "cancelled"

    @pytest.mark.postgres
    def test_rows_that_others_hold_hide_no_other_request(
        self, other: BaseDatabaseWrapper, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(housekeeping, "PAGE", 2)
        ids = [jobtasks.add.enqueue(n, n).id for n in range(5)]
        for id in ids:
            CancelRequest.objects.create(job_id=id, requested_at=timezone.now())
        for id in ids[:4]:
            hold(other, id)
        sweep(USING)
        assert Job.objects.get(pk=ids[4]).state == "cancelled"

    @pytest.mark.postgres
    def test_running_row_that_somebody_holds_is_not_waited_for(
        self, worker: Worker, other: BaseDatabaseWrapper
    ) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        claim(worker)
        hold(other, id)
        assert control.cancel(id, "now") == "requested"

    @pytest.mark.postgres
    def test_completion_under_way_is_not_waited_for(
        self, worker: Worker, other: BaseDatabaseWrapper
    ) -> None:
        """The job ends in a transaction that isn't committed yet: `requested`, then forgotten."""
        id = jobtasks.add.enqueue(1, 2).id
        claim(worker)
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("UPDATE echomq_job SET state = 'completed', finished_at = now()")
            assert control.cancel(id, "now") == "requested"
            cursor.execute("COMMIT")
        sweep(USING)
        assert Job.objects.get(pk=id).state == "completed"
        assert not CancelRequest.objects.exists()


class TestRetry:
    def test_failed_job_gets_one_more_attempt_and_keeps_its_errors(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        Job.objects.update(max_attempts=1)
        error = error_record(ValueError("no"), attempt=1, worker="w1", at=now())
        settle(USING, [outcome(claim(worker)[0], Ending.RAISED, error=error)])
        assert Job.objects.get(pk=id).state == "failed"
        with hearing() as heard:
            assert control.retry(id) == "retried"
            assert heard.names() == ["retrying"]
        assert control.retry(id) == "unfinished"
        job = Job.objects.get(pk=id)
        assert (job.state, job.max_attempts, job.finished_at) == ("ready", 2, None)
        (claimed,) = claim(worker)
        assert (claimed.attempt, claimed.fence, len(claimed.errors)) == (2, 2, 1)
        settle(USING, [outcome(claimed)])
        assert control.retry(id) == "completed"

    def test_cancelled_job_forgets_its_cancel(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        control.cancel(id, "by mistake")
        CancelRequest.objects.create(job_id=id, requested_at=timezone.now())
        assert control.retry(id) == "retried"
        sweep(USING)
        (claimed,) = claim(worker)
        assert str(claimed.id) == id and Job.objects.get(pk=id).cancel_reason == ""
