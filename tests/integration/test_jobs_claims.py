"""Claims: order, the fence, rows that others hold, the floor, a million finished rows."""

from __future__ import annotations

import datetime as dt
import threading
from collections import Counter

import pytest
from django.db import connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from echomq_app.jobs import claims as claiming
from echomq_app.jobs import claims_sqlite
from echomq_app.jobs.claims import Claims
from echomq_app.jobs.housekeeping import promote
from echomq_app.models import CancelRequest, Job, Worker
from tests import jobtasks
from tests.databases import end
from tests.integration.jobs import USING, claim, history, outcome, register

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def worker() -> Worker:
    return register()


def enqueue(count: int, **options: object) -> list[str]:
    return [jobtasks.add.using(**options).enqueue(n, n).id for n in range(count)]  # type: ignore[arg-type]


def ids_of(claimed: list[claiming.ClaimedJob]) -> list[str]:
    return [str(job.id) for job in claimed]


class TestOrder:
    def test_priority_then_time_then_id(self, worker: Worker) -> None:
        low = enqueue(2, priority=-5)
        plain = enqueue(2)
        high = enqueue(2, priority=5)
        assert ids_of(claim(worker, 10)) == [*high, *plain, *low]

    def test_only_its_queue(self, worker: Worker) -> None:
        enqueue(1, queue_name="mail")
        assert claim(worker) == []
        assert len(claim(worker, queue="mail")) == 1

    def test_scheduled_job_comes_when_it_is_due(self, worker: Worker) -> None:
        later = timezone.now() + dt.timedelta(seconds=60)
        (id,) = enqueue(1, run_after=later)
        assert promote(USING, ["default"]) == set() and claim(worker) == []
        Job.objects.update(run_after=timezone.now())
        assert promote(USING, ["other"]) == set()
        assert promote(USING, ["default"]) == {"default"}
        assert ids_of(claim(worker)) == [id]


class TestClaim:
    def test_raises_the_fence_and_counts_no_attempt(self, worker: Worker) -> None:
        (id,) = enqueue(1)
        (claimed,) = claim(worker, begun=False)
        job = Job.objects.get(pk=id)
        assert (job.state, job.attempt, job.fence, job.has_begun) == ("running", 0, 1, False)
        assert (job.worker_id, job.worker_name) == (worker.pk, "w1")
        assert (claimed.attempt, claimed.fence, claimed.max_attempts) == (1, 1, 3)
        assert claimed.arguments == {"args": [0, 0], "kwargs": {}}
        assert claimed.started_at is claimed.attempted_at is job.attempted_at is None
        assert history(id) == ["enqueued"]

    def test_job_whose_cancel_was_requested_is_not_claimed(self, worker: Worker) -> None:
        first, second = enqueue(2)
        CancelRequest.objects.create(job_id=first, requested_at=timezone.now())
        assert ids_of(claim(worker, 10)) == [second]

    @pytest.mark.parametrize("ended", ["lost_at", "stopped_at"])
    def test_worker_without_a_lease_claims_nothing(self, worker: Worker, ended: str) -> None:
        enqueue(1)
        Worker.objects.update(**{ended: timezone.now()})
        assert claim(worker) == []
        assert Job.objects.get().state == "ready"

    def test_many_threads_claim_each_job_once(self) -> None:
        ids = enqueue(120)
        barrier = threading.Barrier(6)
        got: list[str] = []

        def work(number: int) -> None:
            try:
                mine = register(f"w{number}")
                barrier.wait()
                while claimed := claim(mine, 7):
                    got.extend(ids_of(claimed))
            finally:
                connections.close_all()

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert Counter(got) == Counter(ids)
        assert set(Job.objects.values_list("fence", flat=True)) == {1}

    @pytest.mark.postgres
    def test_row_that_somebody_holds_is_passed_over(self, worker: Worker) -> None:
        first, second = enqueue(2)
        other = _second_connection()
        try:
            with other.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute("SELECT 1 FROM echomq_job WHERE id = %s FOR UPDATE", (_uuid(first),))
            assert ids_of(claim(worker, 2)) == [second]
        finally:
            # Closing alone isn't enough: the server lets go of the row a moment later.
            other.cursor().execute("ROLLBACK")
            end(other)
        assert ids_of(claim(worker, 2)) == [first]

    @pytest.mark.postgres
    def test_is_one_statement(self, worker: Worker) -> None:
        from django.test.utils import CaptureQueriesContext

        enqueue(3)
        with CaptureQueriesContext(connection) as queries:
            assert len(claim(worker, 2, begun=False)) == 2
        texts = [query["sql"] for query in queries if "SHOW" not in query["sql"]]
        assert len(texts) == 1 and "echomq_claim_v1" in texts[0]

    @pytest.mark.sqlite
    def test_idle_look_takes_no_write_lock(self, worker: Worker) -> None:
        other = _second_connection()
        try:
            with other.cursor() as cursor:
                cursor.execute("BEGIN IMMEDIATE")
                assert claim(worker) == []
                cursor.execute("ROLLBACK")
        finally:
            end(other)


@pytest.mark.postgres
class TestFloor:
    """Each claim starts where the last one ended; what that hides is found soon."""

    def test_claims_in_order_and_finds_a_late_commit_and_a_higher_priority(
        self, worker: Worker
    ) -> None:
        now = [1000.0]
        claims = Claims(USING, clock=lambda: now[0])

        def take(limit: int) -> list[str]:
            return ids_of(
                claims.take("default", worker_id=worker.pk, worker_name="w1", limit=limit)
            )

        ids = enqueue(6)
        assert take(2) == ids[:2]
        # Behind the floor: enqueued long ago, committed now.
        Job.objects.filter(pk=ids[5]).update(run_after=timezone.now() - dt.timedelta(hours=1))
        (urgent,) = enqueue(1, priority=9)
        assert take(2) == ids[2:4]  # the floor hides both
        now[0] += claiming.FRONT_INTERVAL
        assert take(2) == [urgent, ids[5]]
        assert take(5) == [ids[4]]  # came up short: looks from the front at once

    def test_takes_no_job_that_somebody_asked_to_cancel(self, worker: Worker) -> None:
        claims = Claims(USING, clock=lambda: 1000.0)

        def take(limit: int) -> list[str]:
            return ids_of(
                claims.take("default", worker_id=worker.pk, worker_name="w1", limit=limit)
            )

        ids = enqueue(4)
        assert take(1) == ids[:1]
        CancelRequest.objects.create(job_id=ids[1], requested_at=timezone.now())
        assert take(2) == ids[2:]

    def test_short_claim_goes_on_with_lower_priorities(self, worker: Worker) -> None:
        claims = Claims(USING)
        high = enqueue(2, priority=1)
        low = enqueue(2)
        taken = [
            ids_of(claims.take("default", worker_id=worker.pk, worker_name="w1", limit=2))
            for _ in range(3)
        ]
        assert taken == [high, low, []]


def test_claim_is_quick_with_a_million_finished_rows(worker: Worker) -> None:
    """Ten ready jobs among many finished ones: the index holds the ready ones alone.

    200,000 rows here, and the plan is looked at rather than the clock.
    """
    rows = 200_000
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            series = f"generate_series(1, {rows}) AS g(n)"
            id = "gen_random_uuid()"
        else:
            series = (
                "(WITH RECURSIVE g(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g"
                f" WHERE n < {rows}) SELECT n FROM g) AS g"
            )
            id = "lower(hex(randomblob(16)))"
        cursor.execute(
            "INSERT INTO echomq_job (id, queue, task_path, arguments, priority, run_after, state,"
            " attempt, max_attempts, options, fence, worker_name, enqueued_at, progress_note,"
            f" errors, cancel_reason) SELECT {id}, 'default', 'x', '{{}}', 0, '2026-01-01',"
            " 'completed', 1, 1, '{}', 1, '', '2026-01-01', '', '[]', '' FROM "
            f"{series}"
        )
        cursor.execute("ANALYZE echomq_job" if connection.vendor == "postgresql" else "ANALYZE")
    ids = enqueue(10)
    assert ids_of(claim(worker, 10)) == ids
    assert claim(worker, 10) == []
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "EXPLAIN SELECT id FROM echomq_job WHERE queue = 'default' AND state = 'ready'"
                " AND NOT parked ORDER BY priority DESC, run_after, id LIMIT 10"
            )
        else:
            front = claims_sqlite._FRONT.format(passed="''", taken="''")
            cursor.execute(f"EXPLAIN QUERY PLAN {front}", ("default", 10))
        plan = str(cursor.fetchall())
    assert "echomq_job_ready" in plan, plan


def test_handed_back_and_claimed_again_the_fence_never_repeats(worker: Worker) -> None:
    from echomq_app.jobs.outcomes import Ending
    from echomq_app.jobs.transitions import settle

    (id,) = enqueue(1)
    fences = []
    for _ in range(3):
        (claimed,) = claim(worker)
        assert claimed.attempt == 1
        fences.append(claimed.fence)
        settle(USING, [outcome(claimed, Ending.HANDED_BACK, reason="shutdown")])
    assert fences == [1, 2, 3]
    assert history(id) == ["enqueued", *["started", "retrying"] * 3]


def _second_connection() -> BaseDatabaseWrapper:
    other = connections[USING].copy()
    other.settings_dict = {**other.settings_dict, "CONN_MAX_AGE": None}
    return other


def _uuid(id: str) -> str:
    from echomq_app.core.ids import JobId

    return JobId.parse(id).hex
