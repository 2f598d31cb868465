"""Leases: who holds one, who loses it, and what becomes of the jobs."""

from __future__ import annotations

import datetime as dt
import threading

import pytest
from django.db import connections, transaction
from django.utils import timezone

from echomq_app.core.ids import JobId
from echomq_app.jobs import control, housekeeping
from echomq_app.jobs.housekeeping import rescue
from echomq_app.models import Job, Worker
from tests import jobtasks
from tests.databases import end, refusing
from tests.integration.jobs import (
    USING,
    claim,
    hearing,
    history,
    records,
    register,
    stored_id,
)
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def expire(worker: Worker) -> None:
    Worker.objects.filter(pk=worker.pk).update(expires_at=timezone.now() - dt.timedelta(seconds=1))


class TestLease:
    def test_late_heartbeat_counts_until_somebody_declares_it_lost(self) -> None:
        worker = register()
        expire(worker)
        assert Worker.objects.heartbeat(worker.pk, 30)
        with transaction.atomic():
            assert Worker.objects.lose_expired() == 0
        expire(worker)
        with transaction.atomic():
            assert Worker.objects.lose_expired() == 1
        assert not Worker.objects.heartbeat(worker.pk, 30)

    @pytest.mark.postgres
    def test_heartbeat_under_way_is_not_taken_for_lost(self) -> None:
        """The renewal isn't committed yet: whoever looks passes the worker over."""
        worker = register()
        expire(worker)
        other = connections[USING].copy()
        try:
            with other.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute("UPDATE echomq_worker SET expires_at = now() + '30 s'")
                with transaction.atomic():
                    assert Worker.objects.lose_expired() == 0
                cursor.execute("COMMIT")
        finally:
            end(other)
        with transaction.atomic():
            assert Worker.objects.lose_expired() == 0

    @pytest.mark.postgres
    def test_heartbeat_waits_for_no_job(self) -> None:
        worker = register()
        jobtasks.add.enqueue(1, 2)
        claim(worker)
        other = connections[USING].copy()
        try:
            with other.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute("SELECT 1 FROM echomq_job FOR UPDATE")
                assert Worker.objects.heartbeat(worker.pk, 30)
        finally:
            end(other)

    def test_old_workers_are_forgotten(self) -> None:
        ended, lost, running = register("ended"), register("lost"), register("running")
        long_ago = timezone.now() - dt.timedelta(days=2)
        Worker.objects.filter(pk=ended.pk).update(stopped_at=long_ago)
        Worker.objects.filter(pk=lost.pk).update(lost_at=long_ago)
        assert Worker.objects.prune() == 2
        assert Worker.objects.get() == running


class TestRescue:
    def test_job_is_ready_again_at_once_and_counts_the_attempt(self) -> None:
        worker = register()
        id = jobtasks.add.enqueue(1, 2).id
        claim(worker)
        assert rescue(USING) == 0
        expire(worker)
        with hearing() as heard:
            assert rescue(USING) == 1
            assert heard.names() == ["stalled", "retrying"]
        job = Job.objects.get(pk=id)
        assert (job.state, job.attempt, job.fence, job.worker_id) == ("ready", 1, 1, None)
        assert job.errors[0]["class"] == "echomq_app.exceptions.WorkerLost"
        assert job.errors[0]["worker"] == "w1"
        assert history(id) == ["enqueued", "started", "stalled", "retrying"]

    def test_one_that_fails_stops_no_other(self, caplog: pytest.LogCaptureFixture) -> None:
        worker = register()
        ids = [jobtasks.add.enqueue(1, number).id for number in range(3)]
        claim(worker, limit=3)
        expire(worker)
        with refusing("UPDATE", "echomq_job", f"OLD.id = {stored_id(ids[1])}"):
            assert rescue(USING) == 2
            assert [Job.objects.get(pk=id).state for id in ids] == ["ready", "running", "ready"]
        assert f"doing=rescue item={ids[1]}" in caplog.text
        assert rescue(USING) == 1

    def test_after_the_last_attempt_it_is_failed(self) -> None:
        worker = register()
        id = jobtasks.add.enqueue(1, 2).id
        Job.objects.update(max_attempts=1)
        claim(worker)
        expire(worker)
        rescue(USING)
        assert Job.objects.get(pk=id).state == "failed"
        event, data = records(id)[-1]
        assert event == "failed" and data["error"]["class"].endswith("WorkerLost")

    def test_after_a_cancel_request_it_is_cancelled(self) -> None:
        worker = register()
        id = jobtasks.add.enqueue(1, 2).id
        claim(worker)
        assert control.cancel(id, "enough") == "requested"
        expire(worker)
        rescue(USING)
        job = Job.objects.get(pk=id)
        assert (job.state, job.cancel_reason) == ("cancelled", "enough")
        assert history(id)[-2:] == ["stalled", "cancelled"]

    def test_worker_whose_row_is_gone_loses_its_jobs(self) -> None:
        worker = register()
        jobtasks.add.enqueue(1, 2)
        claim(worker)
        Worker.objects.all().delete()
        assert rescue(USING) == 1

    def test_many_rescuers_rescue_once(self) -> None:
        worker = register()
        ids = [jobtasks.add.enqueue(n, n).id for n in range(30)]
        claim(worker, 30)
        expire(worker)
        barrier = threading.Barrier(4)
        rescued: list[int] = []

        def work() -> None:
            try:
                barrier.wait()
                rescued.append(rescue(USING))
            finally:
                connections.close_all()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(rescued) == 30
        assert [history(id).count("stalled") for id in ids] == [1] * 30

    @pytest.mark.postgres
    def test_rows_that_others_hold_hide_no_stuck_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(housekeeping, "PAGE", 5)
        worker = register()
        ids = [jobtasks.add.enqueue(n, n).id for n in range(12)]
        claim(worker, 12)
        expire(worker)
        other = connections[USING].copy()
        try:
            with other.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute(
                    "SELECT 1 FROM echomq_job WHERE id = ANY (%s::uuid[]) FOR UPDATE",
                    ([JobId.parse(id).hex for id in ids[:11]],),
                )
            assert rescue(USING) == 1
            assert Job.objects.get(pk=ids[11]).state == "ready"
        finally:
            end(other)
        wait_until(lambda: rescue(USING) == 11)
