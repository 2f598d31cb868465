"""When an attempt counts: as its handler begins, and what then is known after a crash."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections
from django.utils import timezone

from echomq_app.core.ids import JobId
from echomq_app.core.prefetch import Prefetch
from echomq_app.jobs import attempts, begins, bulk, control, housekeeping
from echomq_app.jobs.begins import begin
from echomq_app.jobs.claims import Claims
from echomq_app.jobs.completer import Completer
from echomq_app.jobs.housekeeping import rescue
from echomq_app.jobs.outcomes import Ending
from echomq_app.jobs.pools import ThreadPool
from echomq_app.jobs.running import RunningJob
from echomq_app.jobs.transitions import settle
from echomq_app.models import Job, Worker
from tests import jobtasks
from tests.databases import refusing, session
from tests.integration.jobs import (
    USING,
    claim,
    finished,
    hearing,
    history,
    outcome,
    records,
    register,
    running_worker,
    stored_id,
)
from tests.jobtasks import marks
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def worker() -> Worker:
    return register()


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(tmp_path / "trace")


def claimed(worker: Worker, limit: int = 1) -> list[RunningJob]:
    return [RunningJob(job) for job in claim(worker, limit, begun=False)]


def lose(worker: Worker) -> None:
    Worker.objects.filter(pk=worker.pk).update(expires_at=timezone.now() - dt.timedelta(seconds=1))


class TestBegin:
    def test_counts_the_attempt_and_records_the_start(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        (job,) = claimed(worker)
        assert begin(USING, [job]) == [job] and job.begun
        row = Job.objects.get(pk=id)
        assert (row.attempt, row.fence, row.has_begun) == (1, 1, True)
        assert job.claimed.attempted_at == row.attempted_at == row.started_at
        # The database records what Python publishes.
        with hearing() as heard:
            begins.publish([job])
            (event,) = heard.so_far()
        assert records(id)[1] == ("started", event.data)

    def test_again_changes_nothing(self, worker: Worker) -> None:
        """Its answer may be lost, and then it is sent again."""
        id = jobtasks.add.enqueue(1, 2).id
        (job,) = claimed(worker)
        assert begin(USING, [job]) == begin(USING, [job]) == [job]
        assert Job.objects.get(pk=id).attempt == 1
        assert history(id) == ["enqueued", "started"]

    def test_job_of_another_claim_does_not_begin(self, worker: Worker) -> None:
        ids = [jobtasks.add.enqueue(n, n).id for n in range(2)]
        late, ours = claimed(worker, 2)
        lose(worker)
        assert rescue(USING) == 2
        other = register("w2")
        again = claimed(other, 2)
        assert begin(USING, [late, ours]) == []
        assert not late.begun
        assert begin(USING, again) == again
        assert set(Job.objects.filter(pk__in=ids).values_list("attempt", "fence")) == {(1, 2)}

    def test_of_two_claims_of_a_job_the_last_one_begins(self, worker: Worker) -> None:
        """Both may wait in one worker, which lost its lease and took a new one."""
        id = jobtasks.add.enqueue(1, 2).id
        (first,) = claimed(worker)
        lose(worker)
        assert rescue(USING) == 1
        (second,) = claimed(register("again"))
        assert begin(USING, [first, second]) == [second]
        assert not first.begun and Job.objects.get(pk=id).attempt == 1

    def test_claim_that_began_and_was_lost_does_not_begin_again(self, worker: Worker) -> None:
        """Its fence is the one that the row last began under, and no longer the row's."""
        id = jobtasks.add.enqueue(1, 2).id
        (first,) = claimed(worker)
        assert begin(USING, [first]) == [first]
        lose(worker)
        assert rescue(USING) == 1
        (second,) = claimed(register("again"))
        assert begin(USING, [first]) == []
        assert begin(USING, [second]) == [second] and Job.objects.get(pk=id).attempt == 2

    @pytest.mark.postgres
    def test_waits_for_no_row_that_another_transaction_holds(self, worker: Worker) -> None:
        held, free = (jobtasks.add.enqueue(n, n).id for n in range(2))
        first, second = claimed(worker, 2)
        other = session()
        try:
            other.execute("BEGIN")
            other.execute(
                "SELECT 1 FROM echomq_job WHERE id = %s FOR UPDATE", [JobId.parse(held).hex]
            )
            assert begin(USING, [first, second]) == [second]
        finally:
            other.close()
        assert (Job.objects.get(pk=held).attempt, Job.objects.get(pk=free).attempt) == (0, 1)

    @pytest.mark.postgres
    def test_does_not_wait_for_the_disk(self, worker: Worker) -> None:
        """And what follows on the same connection does."""
        jobtasks.add.enqueue(1, 2)
        (job,) = claimed(worker)
        begin(USING, [job])
        with connection.cursor() as cursor:
            cursor.execute("SHOW synchronous_commit")
            assert cursor.fetchone() == ("on",)
            cursor.execute("SELECT prosrc FROM pg_proc WHERE proname = 'echomq_begin_v1'")
            assert "set_config('synchronous_commit', 'off', true)" in cursor.fetchone()[0]


@pytest.mark.postgres
def test_a_claim_counts_the_first_ones_up_to_one_that_must_have_its_slot(worker: Worker) -> None:
    """In the order of the queue, and no last attempt: that is the starter's."""
    ids = [jobtasks.add.enqueue(n, n).id for n in range(2)]
    ids.append(jobtasks.add.using(max_attempts=1).enqueue(2, 2).id)
    ids += [jobtasks.add.enqueue(n, n).id for n in range(3, 5)]
    jobs = Claims(USING).take(
        "default", worker_id=worker.pk, worker_name=worker.name, limit=5, count_first=4
    )
    assert [job.has_begun for job in jobs] == [True, True, False, False, False]
    assert [job.attempt for job in jobs] == [1] * 5
    assert [Job.objects.get(pk=id).attempt for id in ids] == [1, 1, 0, 0, 0]
    assert [history(id) for id in ids[1:3]] == [["enqueued", "started"], ["enqueued"]]


class TestLost:
    def test_job_that_did_not_begin_comes_back_as_if_nothing_had_been(self, worker: Worker) -> None:
        id = jobtasks.add.using(max_attempts=1).enqueue(1, 2).id
        claimed(worker)
        lose(worker)
        with hearing() as heard:
            assert rescue(USING) == 1
            assert heard.names() == []
        job = Job.objects.get(pk=id)
        assert (job.state, job.attempt, job.fence, job.worker_id) == ("ready", 0, 1, None)
        assert job.errors == [] and job.started_at is None
        assert history(id) == ["enqueued"]

    def test_job_that_began_has_used_its_attempt(self, worker: Worker) -> None:
        id = jobtasks.add.using(max_attempts=1).enqueue(1, 2).id
        begin(USING, claimed(worker))
        lose(worker)
        assert rescue(USING) == 1
        job = Job.objects.get(pk=id)
        assert (job.state, job.attempt) == ("failed", 1)
        assert history(id) == ["enqueued", "started", "stalled", "failed"]

    def test_job_that_did_not_begin_and_was_cancelled(self, worker: Worker) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        claimed(worker)
        assert control.cancel(id, "enough") == "requested"
        lose(worker)
        rescue(USING)
        job = Job.objects.get(pk=id)
        assert (job.state, job.cancel_reason, job.attempt) == ("cancelled", "enough", 0)
        assert history(id) == ["enqueued", "cancel_requested", "cancelled"]

    def test_second_claim_that_did_not_begin_keeps_what_the_first_one_counted(
        self, worker: Worker
    ) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        (first,) = claimed(worker)
        begin(USING, [first])
        error = {"class": "ValueError", "message": "no", "traceback": "", "attempt": 1}
        settle(USING, [outcome(first.claimed, Ending.RAISED, error=error)])
        Job.objects.update(state="ready")  # without its backoff
        claimed(worker)
        lose(worker)
        rescue(USING)
        job = Job.objects.get(pk=id)
        assert (job.state, job.attempt, job.fence) == ("ready", 1, 2)
        assert len(job.errors) == 1


class Held:
    """Keeps every write of outcomes back until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = threading.Event()
        write = Completer._write

        def held(completer: Completer, batch: list[Any]) -> bool:
            self.free.wait(30)
            return write(completer, batch)

        monkeypatch.setattr(Completer, "_write", held)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.free.set()


@pytest.mark.parametrize("task", ["note", "anote"])
def test_after_a_last_attempt_the_slot_waits_until_its_outcome_is_written(
    task: str, trace: str, outcomes: Held
) -> None:
    """What runs next may kill the process, and a finished job must not fail by that."""
    note = getattr(jobtasks, task)
    ids = [note.using(max_attempts=1).enqueue(trace).id for _ in range(2)]
    with running_worker(concurrency=1):
        wait_until(lambda: Job.objects.filter(state="running").count() == 1 and marks(trace))
        assert [Job.objects.get(pk=id).attempt for id in ids] == [1, 0]
        outcomes.free.set()
        assert [finished(id).state for id in ids] == ["completed"] * 2
    assert marks(trace) == ids


def test_after_an_earlier_attempt_it_does_not(trace: str, outcomes: Held) -> None:
    ids = [jobtasks.note.enqueue(trace).id for _ in range(2)]
    with running_worker(concurrency=1):
        wait_until(lambda: marks(trace) == ids)
        outcomes.free.set()
        assert [finished(id).state for id in ids] == ["completed"] * 2


def test_only_first_attempts_are_counted_ahead(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if thousands of jobs began each second, while one keeps the only slot."""
    monkeypatch.setattr(Prefetch, "ahead", lambda self, *rate: 10)
    monkeypatch.setattr(Prefetch, "counted_ahead", lambda self: 10)
    first = jobtasks.until_cancelled.enqueue(trace).id
    with running_worker(concurrency=1):
        wait_until(lambda: marks(trace))
        again = jobtasks.noop.using(priority=1).enqueue(0).id
        several = jobtasks.noop.using(priority=2).enqueue(1).id
        last = jobtasks.noop.using(max_attempts=1).enqueue(2).id
        wait_until(lambda: Job.objects.get(pk=several).attempt == 1)
        counted = dict(Job.objects.values_list("pk", "attempt"))
        assert counted[JobId.parse(last)] == 0
        control.cancel(first)
        assert [finished(id).attempt for id in (again, several, last)] == [1, 1, 1]


def test_database_that_fails_as_a_job_begins_delays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from django.db import OperationalError

    failures = iter([OperationalError("gone"), OperationalError("gone")])

    def failing(using: str, jobs: list[RunningJob]) -> list[RunningJob]:
        for error in failures:
            raise error
        return begin(using, jobs)

    monkeypatch.setattr(begins, "begin", failing)
    with running_worker():
        job = finished(jobtasks.add.enqueue(1, 2).id)
    assert (job.state, job.attempt) == ("completed", 1)
    connections.close_all()


COUNTS = "OLD.id = {id} AND NEW.attempt > OLD.attempt"


def test_one_job_that_cannot_be_counted_stops_no_other(trace: str) -> None:
    """A trigger of the project's refuses it: it fails by that, and isn't tried without end."""
    good = [jobtasks.note.enqueue(trace).id for _ in range(3)]
    bad = jobtasks.add.using(max_attempts=1).enqueue(1, 2).id
    good += [jobtasks.note.enqueue(trace).id for _ in range(3)]
    with refusing("UPDATE", "echomq_job", COUNTS.format(id=stored_id(bad))):
        with running_worker(concurrency=2):
            assert {finished(id).state for id in good} == {"completed"}
            job = finished(bad)
    assert (job.state, job.attempt) == ("failed", 0)
    assert "not today" in job.errors[0]["message"]


def test_job_for_which_there_is_no_thread_goes_back(
    trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once and once, not again and again; its attempt doesn't count."""
    submit, refusals, calls = ThreadPool.submit, [True], []

    def refuses(self: ThreadPool, work: Any) -> None:
        if refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        submit(self, work)

    def counting(using: str, jobs: list[RunningJob]) -> list[RunningJob]:
        calls.append(len(jobs))
        return begin(using, jobs)

    monkeypatch.setattr(ThreadPool, "submit", refuses)
    monkeypatch.setattr(begins, "begin", counting)
    id = jobtasks.note.enqueue(trace).id
    with running_worker():
        job = finished(id)
    assert (job.state, job.attempt, job.fence) == ("completed", 1, 2)
    assert calls == [1, 1]


def test_job_that_is_counted_while_its_worker_stops_goes_back(
    trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statement is under way when the buffer is emptied; it isn't waited for in vain."""
    monkeypatch.setattr(attempts, "STARTER_END", 0.1)
    under_way, may_end = threading.Event(), threading.Event()

    def slow(using: str, jobs: list[RunningJob]) -> list[RunningJob]:
        under_way.set()
        assert may_end.wait(30)
        return begin(using, jobs)

    monkeypatch.setattr(begins, "begin", slow)
    id = jobtasks.note.enqueue(trace).id
    with running_worker(grace=60.0) as running:
        assert under_way.wait(30)
        running.stop()
        wait_until(lambda: running._attempts._buffer.closed)
        timer = threading.Timer(0.5, may_end.set)  # past STARTER_END
        timer.start()
    job = Job.objects.get(pk=id)
    assert (job.state, job.attempt, marks(trace)) == ("ready", 0, [])


def test_queue_with_many_due_jobs_delays_no_other() -> None:
    far = timezone.now() + dt.timedelta(hours=1)
    task = jobtasks.noop.using(run_after=far)
    bulk.enqueue_many(task, [((n,), {}) for n in range(2 * housekeeping.PROMOTE_BATCH)])
    task.using(queue_name="mail").enqueue(1)
    Job.objects.update(run_after=timezone.now() - dt.timedelta(minutes=1))
    assert housekeeping.promote(USING, ["default", "mail"]) == {"default", "mail"}
