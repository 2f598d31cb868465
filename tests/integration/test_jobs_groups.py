"""Groups: a limit of how many jobs of a key run at once, exact, and in nobody's way."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, connections, transaction

from echomq_app.jobs import control
from echomq_app.jobs.claims import ClaimedJob, Claims
from echomq_app.jobs.outcomes import Ending
from echomq_app.jobs.transitions import settle
from echomq_app.models import Job, Worker
from tests import jobtasks
from tests.databases import concurrently, session
from tests.integration.jobs import USING, claim, finished, outcome, register, running_worker
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

add: Any = jobtasks.add


@pytest.fixture
def worker() -> Worker:
    return register()


def enqueue(count: int, group: str = "", limit: int | None = None, **more: Any) -> list[str]:
    task = add.using(group=group, concurrency=limit, **more)
    return [task.enqueue(n, n).id for n in range(count)]


def ids_of(claimed: list[ClaimedJob]) -> list[str]:
    return [str(job.id) for job in claimed]


def finish(*jobs: ClaimedJob, ending: Ending = Ending.RETURNED, **more: Any) -> None:
    rest = [outcome(job, ending, **more) for job in jobs]

    def is_settled() -> bool:
        nonlocal rest
        rest = settle(USING, rest).later
        return not rest

    # A claim that looked before another had claimed a job holds its row until it commits.
    wait_until(is_settled)


class TestLimit:
    def test_no_more_than_the_limit_and_the_others_go_on(self, worker: Worker) -> None:
        of_group = enqueue(5, "g", 2)
        free = enqueue(3)
        claimed = claim(worker, 10)
        assert ids_of(claimed) == [*of_group[:2], *free]
        assert claim(worker, 10) == []
        finish(claimed[1])
        (third,) = claim(worker, 10)
        assert str(third.id) == of_group[2]
        finish(claimed[0], third)
        assert ids_of(claim(worker, 10)) == of_group[3:]
        assert not Job.objects.filter(parked=True).exists()

    def test_an_attempt_that_ends_in_any_way_makes_room(self, worker: Worker) -> None:
        first, second = enqueue(2, "g")
        error = {"class": "E", "message": ""}
        for ending, more in (
            (Ending.HANDED_BACK, {"reason": "shutdown"}),
            (Ending.ABANDONED, {"error": error}),
        ):
            (job,) = claim(worker, 5)
            assert str(job.id) == first
            finish(job, ending=ending, **more)
        (job,) = claim(worker, 5)
        finish(job, ending=Ending.STOPPED, reason="enough")
        assert ids_of(claim(worker, 5)) == [second]

    def test_in_order_of_priority_within_the_group(self, worker: Worker) -> None:
        (running,) = enqueue(1, "g")
        low, high = enqueue(1, "g", priority=-1), enqueue(1, "g", priority=1)
        order = []
        while claimed := claim(worker, 5):
            order += ids_of(claimed)
            finish(*claimed)
            if len(order) == 1:
                late = enqueue(1, "g", priority=5)
        assert order == [*high, *late, running, *low]

    def test_a_task_with_a_limit_of_its_own_is_a_group(self, worker: Worker) -> None:
        enqueue(3, limit=2)
        once = jobtasks.once_per_arguments.enqueue(1)
        assert len(claim(worker, 10)) == 3 and claim(worker, 10) == []
        assert Job.objects.get(pk=once.id).group_key == ""

    def test_a_group_spans_tasks_and_queues(self, worker: Worker) -> None:
        enqueue(1, "g")
        other: Any = jobtasks.once_per_arguments
        other.using(group="g", queue_name="mail").enqueue(1)
        (job,) = claim(worker, 5)
        assert claim(worker, 5, queue="mail") == []
        finish(job)
        assert len(claim(worker, 5, queue="mail")) == 1

    def test_a_parked_job_can_be_cancelled_and_retried(self, worker: Worker) -> None:
        first, second = enqueue(2, "g")
        (job,) = claim(worker, 5)
        assert Job.objects.get(pk=second).parked
        assert control.cancel(second) == "cancelled" and control.retry(second) == "retried"
        finish(job)
        assert ids_of(claim(worker, 5)) == [second] and str(job.id) == first


class TestBacklog:
    def test_jobs_behind_a_full_group_are_found_and_each_is_met_once(self, worker: Worker) -> None:
        """3,500 jobs of a full group at the front of the queue: more than one round."""
        (template,) = enqueue(1, "g")
        row = Job.objects.get(pk=template)
        from echomq_app.core.ids import new_job_id

        rows = []
        for _ in range(3500):
            row.pk = new_job_id()
            rows.append(Job(**{f.attname: getattr(row, f.attname) for f in Job._meta.fields}))
        for job in rows:
            job.worker_id = None
        Job.objects.bulk_create(rows, batch_size=500)
        others = enqueue(3, priority=-1)
        claims = Claims(USING)
        claimed = claims.take("default", worker_id=worker.pk, worker_name="w1", limit=4)
        assert ids_of(claimed)[1:] == others
        assert Job.objects.filter(parked=True).count() == 3500
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE")
        enqueue(1)
        begun = time.perf_counter()
        assert len(claims.take("default", worker_id=worker.pk, worker_name="w1", limit=4)) == 1
        assert time.perf_counter() - begun < 2.0
        finish(claimed[0])
        assert len(claim(worker, 4)) == 1

    def test_many_full_groups(self, worker: Worker) -> None:
        groups = [f"g{n}" for n in range(40)]
        ids = {group: enqueue(3, group) for group in groups}
        first = claim(worker, 100)
        assert sorted(ids_of(first)) == sorted(ids[group][0] for group in groups)
        finish(*first[:7])
        assert len(claim(worker, 100)) == 7
        assert claim(worker, 100) == []

    @pytest.mark.postgres
    def test_a_parked_job_that_somebody_holds_does_not_stop_its_group(self, worker: Worker) -> None:
        ids = enqueue(3, "g")
        (job,) = claim(worker, 5)
        with session() as other:
            other.execute("BEGIN")
            other.execute(
                "SELECT 1 FROM echomq_job WHERE state = 'ready' AND parked"
                " ORDER BY run_after, id LIMIT 1 FOR UPDATE"
            )
            finish(job)
            (third,) = claim(worker, 5)
            other.execute("ROLLBACK")
        assert str(third.id) == ids[2]


class TestRaces:
    @pytest.mark.postgres
    def test_claim_that_is_not_committed_yet_counts(self, worker: Worker) -> None:
        """The second claim can't see it: only the group's lock says that somebody is at it."""
        enqueue(4, "g", 1)
        enqueue(1)
        other = register("w2")
        with transaction.atomic():
            assert len(claim(worker, 1)) == 1
            (free,) = concurrently(lambda: claim(other, 5))[0]
            assert Job.objects.get(pk=free.id).group_key == ""
        assert claim(other, 5) == []
        assert Job.objects.running().filter(group_key="group:g").count() == 1

    def test_many_workers_never_run_more_than_the_limit(self) -> None:
        total, limit = 60, 3
        ids = enqueue(total, "g", limit)
        barrier = threading.Barrier(5)
        lock = threading.Lock()
        running, most, got = 0, 0, Counter[str]()

        def work(number: int) -> None:
            nonlocal running, most
            mine = register(f"w{number}")
            claims = Claims(USING)
            barrier.wait()
            deadline = time.monotonic() + 60
            while sum(got.values()) < total and time.monotonic() < deadline:
                claimed = claims.take("default", worker_id=mine.pk, worker_name=mine.name, limit=4)
                with lock:
                    running += len(claimed)
                    most = max(most, running)
                    got.update(ids_of(claimed))
                with lock:  # before the end is written: then another may claim at once
                    running -= len(claimed)
                if claimed:
                    finish(*claimed)

        try:
            concurrently(*[lambda n=n: work(n) for n in range(5)], timeout=90)
        finally:
            connections.close_all()
        assert got == Counter(ids) and most <= limit
        assert not Job.objects.filter(state="ready").exists()


def test_a_worker_runs_a_group_one_after_the_other() -> None:
    with running_worker(concurrency=4):
        ids = enqueue(8, "g")
        jobs = [finished(id) for id in ids]
    spans = sorted((str(job.attempted_at), str(job.finished_at)) for job in jobs)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_the_end_of_a_job_wakes_its_worker_for_the_next_of_the_group() -> None:
    ids = enqueue(6, "g")
    with running_worker(poll=600.0):
        for id in ids:
            finished(id)


@pytest.fixture
def parkings() -> Iterator[None]:
    """Keep when each job was parked, in the table `parkings`."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TABLE parkings (at timestamptz);"
            "CREATE FUNCTION parking() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
            " INSERT INTO parkings VALUES (clock_timestamp()); RETURN NEW; END$$;"
            "CREATE TRIGGER parking BEFORE UPDATE ON echomq_job FOR EACH ROW"
            " WHEN (NEW.parked AND NOT OLD.parked) EXECUTE FUNCTION parking()"
        )
    yield
    with connection.cursor() as cursor:
        cursor.execute("DROP FUNCTION parking() CASCADE; DROP TABLE parkings")


@pytest.mark.postgres
@pytest.mark.usefixtures("parkings")
def test_an_attempt_begins_when_its_claim_has_counted_the_group(worker: Worker) -> None:
    """Else it would begin before the end of the job that it waited for."""
    enqueue(3, "g")
    claim(worker, 1)
    (free,) = enqueue(1)
    assert ids_of(claim(worker, 1)) == [free]
    with connection.cursor() as cursor:
        cursor.execute("SELECT max(at), count(*) FROM parkings")
        parked_at, count = cursor.fetchone()
    assert count == 2 and Job.objects.get(pk=free).attempted_at > parked_at
