"""What workers look for all the time costs the same beside a few jobs and beside very many."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest
from django.db import connection, connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from echomq_app.jobs import draining, housekeeping, looks
from echomq_app.jobs.housekeeping import Housekeeper, promote, rescue_abandoned, sweep
from echomq_app.models import CancelRequest, Job, Worker
from echomq_app.models.times import database_now
from tests import jobtasks
from tests.costs import analyze, cost_of
from tests.databases import session
from tests.integration.jobs import USING, claim, register
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

FEW, MANY = 200, 60_000
HOUR = dt.timedelta(hours=1)


def jobs_by_sql(count: int, state: str, **columns: str) -> None:
    """Insert so many jobs in one statement."""
    later = "clock_timestamp() + interval '1 hour'"
    id, number = "gen_random_uuid()", "generate_series(1, %s) AS n"
    at = "clock_timestamp()"
    if connection.vendor == "sqlite":
        later, at, id = (
            "datetime('now', '+1 hour')",
            "datetime('now')",
            "lower(hex(randomblob(16)))",
        )
        number = (
            "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s LIMIT %s)"
            " SELECT n FROM s) AS n"
        )
    values = {
        "id": id,
        "queue": "'default'",
        "task_path": "'tests.jobtasks.add'",
        "arguments": """'{"args": [1, 2], "kwargs": {}}'""",
        "priority": "0",
        "run_after": later if state == "scheduled" else at,
        "state": f"'{state}'",
        "attempt": "0",
        "max_attempts": "3",
        "options": "'{}'",
        "fence": "0",
        "worker_name": "''",
        "enqueued_at": at,
        "progress_note": "''",
        "errors": "'[]'",
        "cancel_reason": "''",
        **columns,
    }
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO echomq_job ({', '.join(values)})"
            f" SELECT {', '.join(values.values())} FROM {number}",
            [count],
        )


def are_jobs_due() -> None:
    assert promote(USING, ["default", "other"]) == set()


def when_is_the_next() -> None:
    found = looks.due(USING, ["default", "other"], database_now(USING))
    assert found.queues == [] and found.next_at is not None


def is_anything_left() -> None:
    assert draining.is_done(USING, ["default", "other"])


def is_anything_to_cancel() -> None:
    sweep(USING)


def is_a_worker_gone() -> None:
    assert rescue_abandoned(USING) == (0, 0)


LOOKS = (are_jobs_due, when_is_the_next, is_anything_left, is_anything_to_cancel, is_a_worker_gone)


@pytest.mark.parametrize("look", LOOKS)
def test_beside_many_scheduled_jobs(look: Callable[[], None]) -> None:
    jobs_by_sql(FEW, "scheduled")
    analyze()
    look()
    few = cost_of(look)
    jobs_by_sql(MANY, "scheduled")
    analyze()
    look()
    assert cost_of(look) <= few + 30


@pytest.mark.postgres
@pytest.mark.parametrize("look", [are_jobs_due, when_is_the_next, is_anything_left])
def test_whatever_the_planner_believes(look: Callable[[], None]) -> None:
    """By its statistics half of the jobs are due: any block of the table will do."""
    jobs_by_sql(MANY // 2, "scheduled", run_after="clock_timestamp() - interval '1 hour'")
    jobs_by_sql(MANY // 2, "scheduled")
    analyze()
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM echomq_job WHERE run_after < clock_timestamp()")
    look()  # the first one marks what is dead in the index
    assert cost_of(look) < 400  # the table has about 2,000


@pytest.mark.parametrize("look", [are_jobs_due, is_anything_to_cancel, is_a_worker_gone])
def test_beside_many_ready_and_finished_jobs(look: Callable[[], None]) -> None:
    jobs_by_sql(FEW, "ready")
    analyze()
    look()
    few = cost_of(look)
    jobs_by_sql(MANY // 2, "ready")
    jobs_by_sql(MANY // 2, "completed")
    analyze()
    look()
    assert cost_of(look) <= few + 30


def test_many_due_jobs_are_promoted_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their times, by an index: not all of them for each batch."""
    monkeypatch.setattr(housekeeping, "PROMOTE_BATCH", 10)
    past = "clock_timestamp() - interval '1 hour'"
    if connection.vendor == "sqlite":
        past = "datetime('now', '-1 hour')"

    def promoted() -> None:
        assert promote(USING, ["default"]) == {"default"}

    jobs_by_sql(FEW, "scheduled", run_after=past)
    analyze()
    few = cost_of(promoted)
    jobs_by_sql(MANY, "scheduled", run_after=past)
    analyze()
    assert cost_of(promoted) <= few * 2
    assert Job.objects.filter(state="ready").count() == 20


def test_a_thousand_queues_are_one_statement() -> None:
    queues = [f"q{n}" for n in range(1_000)]
    jobtasks.add.using(queue_name="q7", run_after=timezone.now() + HOUR).enqueue(1, 2)
    Job.objects.update(queue="q7")
    for look in (
        lambda: promote(USING, queues, database_now(USING)),
        lambda: looks.with_ready_jobs(USING, queues),
    ):
        with CaptureQueriesContext(connection) as statements:
            assert not look()
        texts = [query["sql"] for query in statements if "echomq_job" in query["sql"]]
        assert len(texts) == 1


class TestReaping:
    """Jobs without a worker are looked for when a lease ran out, and now and then."""

    @pytest.fixture
    def housekeeper(self) -> Housekeeper:
        """Return one that has had its first turn."""
        one = Housekeeper(USING, ["default"], interval=1.0, patience=10.0, on_ready=lambda: None)
        one._rescue()
        return one

    def test_a_turn_without_a_lost_lease_reads_no_job(self, housekeeper: Housekeeper) -> None:
        jobtasks.add.enqueue(1, 2)
        claim(register())
        with CaptureQueriesContext(connection) as statements:
            housekeeper._rescue()
        assert not [query for query in statements if "echomq_job" in query["sql"]]
        housekeeper._next_rescue -= housekeeping.RESCUE_INTERVAL
        with CaptureQueriesContext(connection) as statements:
            housekeeper._rescue()
        assert [query for query in statements if "echomq_job" in query["sql"]]

    def test_a_lost_lease_is_noticed_at_once(self, housekeeper: Housekeeper) -> None:
        worker = register()
        id = jobtasks.add.enqueue(1, 2).id
        claim(worker)
        Worker.objects.filter(pk=worker.pk).update(expires_at=timezone.now() - HOUR)
        housekeeper._rescue()
        assert Job.objects.get(pk=id).state == "ready"

    @pytest.mark.postgres
    def test_a_row_that_was_held_is_looked_for_in_the_next_turn(
        self, housekeeper: Housekeeper
    ) -> None:
        worker = register()
        id = jobtasks.add.enqueue(1, 2).id
        claim(worker)
        Worker.objects.filter(pk=worker.pk).update(expires_at=timezone.now() - HOUR)
        other = session()
        try:
            other.execute("BEGIN")
            other.execute("SELECT 1 FROM echomq_job FOR UPDATE")
            housekeeper._rescue()
            assert Job.objects.get(pk=id).state == "running"
        finally:
            other.close()

        def rescued() -> bool:
            housekeeper._rescue()
            return Job.objects.get(pk=id).state == "ready"

        wait_until(rescued, housekeeping.RESCUE_INTERVAL / 2)


def test_requests_for_jobs_that_run_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of requests: some answered, some of jobs that run, some of jobs that wait."""
    monkeypatch.setattr(housekeeping, "PAGE", 2)
    ids = [jobtasks.add.enqueue(n, n).id for n in range(9)]
    claim(register(), 3)
    with transaction.atomic():
        for id in ids:
            CancelRequest.objects.create(job_id=id, requested_at=timezone.now())
    Job.objects.filter(pk__in=ids[6:]).update(state="completed", finished_at=timezone.now())
    sweep(USING)
    assert {str(request.pk) for request in CancelRequest.objects.all()} == set(ids[:3])
    states = dict(Job.objects.values_list("pk", "state"))
    assert [states[Job.objects.get(pk=id).pk] for id in ids] == [
        *["running"] * 3,
        *["cancelled"] * 3,
        *["completed"] * 3,
    ]
    connections.close_all()
