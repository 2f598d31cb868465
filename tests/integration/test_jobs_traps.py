"""Faults that users of other job systems met, and that no other test here stands for."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import pytest
from asgiref.sync import ThreadSensitiveContext
from django.db import connection
from django.test.utils import CaptureQueriesContext

from echomq_app import events
from echomq_app.jobs import control
from echomq_app.jobs.housekeeping import promote, rescue, sweep
from echomq_app.models import Job
from echomq_app.stream import Stream
from tests import jobtasks
from tests.databases import session
from tests.integration.jobs import USING, claim, finished, register, running_worker
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

MANY = 50_000


class TestReadersOfEvents:
    def test_resumes_from_a_saved_token_without_gap_or_repeat(self) -> None:
        """Each page is read by a reader that has just begun, while workers write."""
        jobtasks.add.enqueue(0, 0)
        wait_until(lambda: Stream("emq.default").relay() == 0)
        start = Stream("emq.default").info()
        token, told = start.token, defaultdict[str, list[str]](list)
        with running_worker():
            ids = [jobtasks.add.enqueue(n, n).id for n in range(40)]
            last = ids[-1]
            end = time.monotonic() + 30
            while told[last][-1:] != ["completed"] or len(told) < 41:
                assert time.monotonic() < end, told
                page = Stream("emq.default").read(token, limit=7)
                for record in page.records:
                    told[record.key].append(record.type)
                token = page.token
            for id in ids:
                finished(id)
        wait_until(lambda: Stream("emq.default").relay() == 0)
        for record in Stream("emq.default").replay(token):
            told[record.key].append(record.type)
        for id in ids:
            assert told[id] == ["enqueued", "started", "completed"]

    async def test_from_now_misses_nothing_that_comes_after_it_is_ready(self) -> None:
        async with events.listen("default") as feed:
            result = await jobtasks.add.aenqueue(1, 2)
            async for item in feed:
                assert isinstance(item, events.Event)
                assert (item.event, str(item.job_id)) == ("enqueued", result.id)
                break


class TestManyFinishedJobs:
    @pytest.fixture
    def finished_jobs(self) -> None:
        if connection.vendor == "postgresql":
            rows, id = f"generate_series(1, {MANY}) AS g(n)", "gen_random_uuid()"
        else:
            id = "lower(hex(randomblob(16)))"
            rows = (
                "(WITH RECURSIVE g(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g"
                f" WHERE n < {MANY}) SELECT n FROM g) AS g"
            )
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO echomq_job (id, queue, task_path, arguments, priority, run_after,"
                " state, attempt, max_attempts, options, fence, worker_name, enqueued_at,"
                f" progress_note, errors, cancel_reason) SELECT {id}, 'default', 'x', '{{}}', 0,"
                " '2026-01-01', 'completed', 1, 1, '{}', 1, '', '2026-01-01', '', '[]', '' FROM "
                f"{rows}"
            )
            cursor.execute("ANALYZE")

    def test_worker_that_starts_is_ready_soon(self, finished_jobs: None) -> None:
        id = jobtasks.add.enqueue(1, 2).id
        begun = time.monotonic()
        with running_worker():
            finished(id)
        assert time.monotonic() - begun < 20  # a second where nothing else runs

    def test_nothing_that_a_worker_does_again_and_again_reads_them_all(
        self, finished_jobs: None
    ) -> None:
        worker = register()
        waiting, running = jobtasks.add.enqueue(1, 2).id, jobtasks.add.enqueue(1, 2).id
        claim(worker)
        control.cancel(waiting)
        control.cancel(running)
        with CaptureQueriesContext(connection) as queries:
            promote(USING, ["default"])
            rescue(USING)
            sweep(USING)
        looked = [
            query["sql"]
            for query in queries
            if "echomq_job" in query["sql"] and query["sql"].startswith(("SELECT", "UPDATE"))
        ]
        assert looked
        explain = "EXPLAIN " if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN "
        for sql in looked:
            with connection.cursor() as cursor:
                cursor.execute(explain + sql.replace("%", "%%"))
                plan = str(cursor.fetchall())
            assert "Seq Scan on echomq_job" not in plan, (sql, plan)
            assert "SCAN echomq_job'" not in plan and "SCAN U0'" not in plan, (sql, plan)


@pytest.mark.postgres
async def test_async_verbs_leave_no_connection_open() -> None:
    """Each connection to an ASGI server has a thread of its own, which ends with it."""
    before = await others()
    async with ThreadSensitiveContext():
        result: Any = await jobtasks.add.aenqueue(1, 2)
        assert await others() <= before
        await jobtasks.add.aget_result(result.id)
        assert await others() <= before
        await result.arefresh()
        assert await others() <= before
        await control.acancel(result.id)
        assert await others() <= before
    assert (await Job.objects.aget(pk=result.id)).state == "cancelled"


async def others() -> int:
    """Count the sessions of this database but the one that asks."""
    with session() as own:
        row = own.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid() AND application_name NOT LIKE 'echomq %'"
        ).fetchone()
    assert row is not None
    return int(row[0])
