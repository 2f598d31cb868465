"""Writing how attempts ended: the fence, rows that others hold, what can't be stored."""

from __future__ import annotations

import datetime as dt
import threading

import pytest
from django.db import connection, connections, transaction
from django.utils import timezone

from echomq_app.core.ids import JobId
from echomq_app.jobs.completer import Completer
from echomq_app.jobs.outcomes import Ending, Outcome, error_record
from echomq_app.jobs.relayer import Relayer
from echomq_app.jobs.running import RunningJob
from echomq_app.jobs.transitions import Settlement, settle, write_progress
from echomq_app.models import CancelRequest, Job, Worker
from echomq_app.models.times import now
from tests import jobtasks
from tests.databases import end, session
from tests.integration.jobs import USING, claim, hearing, history, outcome, records, register
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def worker() -> Worker:
    return register()


def error() -> dict[str, object]:
    return error_record(ValueError("no"), attempt=1, worker="w1", at=now())


class TestEndings:
    def test_completed(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        (claimed,) = claim(worker)
        settled = settle(USING, [outcome(claimed, result='{"a": 3}', progress=(1.0, "all"))])
        assert settled.later == settled.lost == []
        job = Job.objects.get(pk=id)
        assert (job.state, job.result) == ("completed", {"a": 3})
        assert (job.progress, job.progress_note) == (1.0, "all")
        assert job.worker_id == worker.pk and job.finished_at is not None
        event, data = records(id)[-1]
        assert event == "completed" and data == settled.entries[-1].data
        assert data["finished_at"] == job.finished_at.astimezone(dt.UTC).isoformat(
            timespec="microseconds"
        )

    def test_failed_attempt_is_scheduled_with_backoff_and_keeps_its_error(
        self, worker: Worker
    ) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        (claimed,) = claim(worker)
        settle(USING, [outcome(claimed, Ending.RAISED, error=error())])
        job = Job.objects.get(pk=id)
        assert (job.state, job.attempt, job.worker_id) == ("scheduled", 1, None)
        assert job.errors[0]["class"] == "builtins.ValueError"
        assert job.run_after <= timezone.now() + dt.timedelta(seconds=2)
        assert history(id)[-1] == "retrying"

    def test_after_a_cancel_request_a_failure_is_final_and_a_return_counts(
        self, worker: Worker
    ) -> None:
        ids = [jobtasks.add.enqueue(n, n).id for n in range(3)]
        jobs = claim(worker, 3)
        for id in ids:
            CancelRequest.objects.create(job_id=id, reason="enough", requested_at=timezone.now())
        endings = [Ending.RAISED, Ending.RETURNED, Ending.STOPPED]
        settle(
            USING,
            [
                outcome(job, ending, error=error() if ending is Ending.RAISED else None)
                for job, ending in zip(jobs, endings, strict=True)
            ],
        )
        states = [Job.objects.get(pk=id).state for id in ids]
        assert states == ["failed", "completed", "cancelled"]
        assert set(Job.objects.values_list("cancel_reason", flat=True)) == {"enough"}
        assert not CancelRequest.objects.exists()
        for id in ids:
            _, data = records(id)[-1]
            assert data["reason"] == "enough" and data["attempt"] == 1
            assert data["id"] == id and data["state"] and data["finished_at"]

    def test_shutdown_and_a_cancel_request_together_are_a_cancel(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        (claimed,) = claim(worker)
        CancelRequest.objects.create(job_id=id, reason="stop", requested_at=timezone.now())
        stopped = outcome(claimed, Ending.STOPPED, reason="shutdown", by_worker=True)
        settle(USING, [stopped])
        assert Job.objects.get(pk=id).state == "cancelled"


class TestFence:
    def test_late_write_of_an_earlier_claim_is_dropped(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        (first,) = claim(worker)
        settle(USING, [outcome(first, Ending.HANDED_BACK, reason="shutdown")])
        (second,) = claim(worker)
        assert first.attempt == second.attempt == 1
        late = settle(USING, [outcome(first, result="1")])
        assert len(late.lost) == 1 and late.entries == []
        assert Job.objects.get(pk=id).state == "running"
        settle(USING, [outcome(second, result="2")])
        assert Job.objects.get(pk=id).result == 2
        assert history(id).count("completed") == 1

    def test_late_write_to_a_job_that_waits_again_is_dropped(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        (claimed,) = claim(worker)
        settle(USING, [outcome(claimed, Ending.HANDED_BACK, reason="shutdown")])
        assert len(settle(USING, [outcome(claimed)]).lost) == 1
        assert Job.objects.get(pk=id).state == "ready"

    def test_written_twice_is_once(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        (claimed,) = claim(worker)
        assert len(settle(USING, [outcome(claimed)] * 2).entries) == 1
        assert settle(USING, [outcome(claimed)]).entries == []
        assert history(id).count("completed") == 1

    def test_late_write_beside_that_of_the_claim_that_counts(self, worker: Worker) -> None:
        """A worker that lost its lease may have claimed the job again: one batch has both."""
        id = jobtasks.add.enqueue(1, 2).id
        (first,) = claim(worker)
        settle(USING, [outcome(first, Ending.HANDED_BACK)])
        (second,) = claim(worker)
        settled = settle(USING, [outcome(first, result="1"), outcome(second, result="2")])
        assert [entry.event for entry in settled.entries] == ["completed"]
        assert Job.objects.get(pk=id).result == 2

    def test_progress_carries_the_fence(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        (claimed,) = claim(worker)
        job_id = JobId.parse(id)
        write_progress(USING, [(job_id, claimed.fence - 1, 0.1, "late")])
        assert Job.objects.get(pk=id).progress is None
        write_progress(USING, [(job_id, claimed.fence, 0.2, "now")])
        assert Job.objects.get(pk=id).progress == 0.2


@pytest.mark.postgres
class TestHeldRows:
    def test_other_completions_go_on_and_the_held_one_comes_later(self, worker: Worker) -> None:
        ids = [jobtasks.add.enqueue(n, n).id for n in range(3)]
        jobs = claim(worker, 3)
        with session() as other:
            other.execute("BEGIN")
            held = JobId.parse(ids[1]).hex
            other.execute("SELECT 1 FROM echomq_job WHERE id = %s FOR UPDATE", (held,))
            settled = settle(USING, [outcome(job) for job in jobs])
            assert [str(late.id) for late in settled.later] == [ids[1]]
            write_progress(USING, [(job.id, job.fence, 0.5, "") for job in jobs])  # doesn't wait
            other.execute("ROLLBACK")
        assert settle(USING, settled.later).later == []
        assert set(Job.objects.values_list("state", flat=True)) == {"completed"}

    def test_held_stream_stops_no_completion(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        assert history(id) == ["enqueued"]  # the stream is there
        (claimed,) = claim(worker)
        other = connections[USING].copy()
        try:
            with other.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute("SELECT 1 FROM echomq_stream FOR UPDATE")
            settle(USING, [outcome(claimed)])
            assert Job.objects.get(pk=id).state == "completed"
            jobtasks.add.enqueue(3, 4)  # nor an enqueue
        finally:
            end(other)
        assert history(id) == ["enqueued", "started", "completed"]


class TestCompleter:
    @pytest.fixture
    def completer(self) -> Completer:
        return Completer(USING, patience=30, on_ready=bool, on_written=bool)

    def test_writes_what_is_put_publishes_it_and_has_it_moved_to_the_stream(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        relayer = Relayer(USING, ["default"], patience=30)
        completer = Completer(USING, patience=30, on_ready=bool, on_written=relayer.soon)
        ids = [jobtasks.add.enqueue(n, n).id for n in range(20)]
        jobs = claim(worker, 20)
        with hearing() as heard:
            relayer.start()
            completer.start()
            for job in jobs:
                completer.report(RunningJob(job), 0.5, "half")
                completer.put(outcome(job))
            assert completer.close(timeout=20)
            relayer.close(timeout=20)
            told = [event for event in heard.so_far() if str(event.job_id) == ids[7]]
        assert [event.event for event in told] == ["progress", "completed"]
        assert told[0].data["fraction"] == 0.5
        assert completer.unwritten == set()
        assert set(Job.objects.values_list("state", flat=True)) == {"completed"}
        from echomq_app.stream import Stream

        # No relay here: that is what the relayer is for.
        assert Stream("emq.default").info().write_cursor == 60

    def test_what_has_come_together_is_one_batch(
        self, worker: Worker, completer: Completer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sizes: list[int] = []

        def counted(using: str, outcomes: list[Outcome]) -> Settlement:
            sizes.append(len(outcomes))
            return settle(using, outcomes)

        monkeypatch.setattr("echomq_app.jobs.completer.settle", counted)
        monkeypatch.setattr("echomq_app.jobs.completer.BATCH", 20)
        for n in range(31):
            jobtasks.add.enqueue(n, n)
        *jobs, last = claim(worker, 31)
        for job in jobs:
            completer.put(outcome(job))
        completer.start()
        wait_until(lambda: not completer.unwritten)
        completer.put(outcome(last))  # and at once, when it is alone
        wait_until(lambda: not completer.unwritten)
        assert completer.close(timeout=20) and sizes == [20, 10, 1]

    def test_says_when_it_is_behind_and_when_it_has_caught_up(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("echomq_app.jobs.completer.BACKLOG", 2)
        caught_up = threading.Event()
        completer = Completer(USING, patience=30, on_ready=caught_up.set, on_written=bool)
        for n in range(3):
            jobtasks.add.enqueue(n, n)
        behind = []
        for job in claim(worker, 3):
            completer.put(outcome(job))
            behind.append(completer.is_behind)
        assert behind == [False, False, True] and not caught_up.is_set()
        completer.start()
        assert caught_up.wait(20)
        assert completer.close(timeout=20) and completer.is_behind is False

    def test_result_that_the_database_cannot_hold_fails_that_job_alone(
        self, worker: Worker, completer: Completer
    ) -> None:
        ids = [jobtasks.add.enqueue(n, n).id for n in range(3)]
        good, bad, other = claim(worker, 3)
        # PostgreSQL's numeric has an end; SQLite's JSON check refuses what is no JSON.
        broken = "1e999999" if connection.vendor == "postgresql" else "{"
        completer.start()
        completer.put(outcome(good))
        completer.put(outcome(bad, result=broken))
        completer.put(outcome(other))
        assert completer.close(timeout=20)
        states = [Job.objects.get(pk=id).state for id in ids]
        assert states[0] == states[2] == "completed"
        assert states[1] == "failed"  # it has done its work: it isn't run again
        assert Job.objects.get(pk=ids[1]).errors

    @pytest.mark.parametrize("reason", ["\ud800", object()])
    def test_outcome_that_is_no_json_fails_that_job_alone(
        self, worker: Worker, completer: Completer, reason: str
    ) -> None:
        ids = [jobtasks.add.enqueue(n, n).id for n in range(2)]
        bad, good = claim(worker, 2)
        completer.put(outcome(bad, Ending.STOPPED, reason=reason))
        completer.put(outcome(good))
        completer.start()
        assert completer.close(timeout=20)
        states = [Job.objects.get(pk=id).state for id in ids]
        assert states == ["cancelled", "completed"]

    @pytest.mark.postgres
    def test_held_row_is_written_when_it_is_free(
        self, worker: Worker, completer: Completer
    ) -> None:
        ids = [jobtasks.add.enqueue(n, n).id for n in range(2)]
        held, free = claim(worker, 2)
        other = connections[USING].copy()
        completer.start()
        try:
            with other.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute("SELECT 1 FROM echomq_job WHERE id = %s FOR UPDATE", (held.id.hex,))
            completer.put(outcome(held))
            completer.put(outcome(free))
            wait_until(lambda: Job.objects.get(pk=ids[1]).state == "completed")
            assert completer.unwritten == {held.id}
        finally:
            end(other)
        wait_until(lambda: not completer.unwritten)
        assert completer.close(timeout=5)
        assert Job.objects.get(pk=ids[0]).state == "completed"

    @pytest.mark.sqlite
    def test_locked_database_is_tried_again(
        self,
        worker: Worker,
        completer: Completer,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        (claimed,) = claim(worker)
        monkeypatch.setitem(connections.settings[USING]["OPTIONS"], "timeout", 0.05)
        other = connections[USING].copy()
        try:
            with other.cursor() as cursor:
                cursor.execute("BEGIN IMMEDIATE")
                completer.start()
                completer.put(outcome(claimed))
                wait_until(lambda: "database is locked" in caplog.text)
                assert completer.unwritten == {claimed.id}
                cursor.execute("ROLLBACK")
        finally:
            end(other)
        wait_until(lambda: not completer.unwritten)
        assert completer.close(timeout=5)
        assert Job.objects.get(pk=id).state == "completed"


@pytest.mark.postgres
def test_one_batch_is_few_statements(worker: Worker) -> None:
    """However many outcomes: lock, requests, update, outbox."""
    from django.test.utils import CaptureQueriesContext

    for n in range(50):
        jobtasks.add.enqueue(n, n)
    jobs = claim(worker, 50)
    with CaptureQueriesContext(connection) as queries, transaction.atomic():
        settle(USING, [outcome(job) for job in jobs])
    assert len([q for q in queries if "SAVEPOINT" not in q["sql"]]) <= 6
