"""Retention of jobs: each goes when its own time is over, in batches, in nobody's way."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import transaction
from django.utils import timezone

from echomq_app.core.ids import new_job_id
from echomq_app.jobs import retention
from echomq_app.jobs.tasks_api import TaskResultDoesNotExist
from echomq_app.models import Job, UniqueWindow
from tests import jobtasks
from tests.databases import concurrently, refusing, session
from tests.integration.jobs import (
    USING,
    claim,
    finished,
    history,
    register,
    running_worker,
    stored_id,
)
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

add: Any = jobtasks.add


def ended(age: float, kept: float | None, *, state: str = "completed", count: int = 1) -> list[Any]:
    """Write jobs that ended `age` seconds ago."""
    at = timezone.now() - dt.timedelta(seconds=age)
    return Job.objects.bulk_create(
        Job(
            id=new_job_id(),
            queue="default",
            task_path="x",
            arguments={},
            run_after=at,
            enqueued_at=at,
            finished_at=None if state in ("ready", "running") else at,
            state=state,
            retention=kept,
        )
        for _ in range(count)
    )


def left() -> set[Any]:
    return set(Job.objects.values_list("pk", flat=True))


def test_each_goes_when_its_own_time_is_over() -> None:
    gone = [*ended(20, 10), *ended(20, 10, state="failed"), *ended(5, 0, state="cancelled")]
    kept = [*ended(5, 10), *ended(9e8, None), *ended(20, 10, state="ready"), *ended(20, 3600.5)]
    UniqueWindow.objects.create(key="a", job_id=gone[0].pk, until=timezone.now())
    UniqueWindow.objects.create(
        key="b", job_id=gone[0].pk, until=timezone.now() + dt.timedelta(seconds=60)
    )
    assert retention.prune_expired(USING) == (3, False)
    retention.prune_windows(USING)
    assert left() == {job.pk for job in kept}
    assert list(UniqueWindow.objects.values_list("key", flat=True)) == ["b"]


def test_in_batches_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 10)
    monkeypatch.setattr(retention, "ROUND", 2)
    ended(20, 10, count=35)
    assert retention.prune_expired(USING) == (20, True)
    assert retention.prune_expired(USING) == (15, False)


def test_by_hand_whatever_their_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "BATCH", 3)
    ended(100, None, count=40)
    kept = [*ended(10, None), *ended(100, None, state="running"), *ended(100, None, state="ready")]
    before = timezone.now() - dt.timedelta(seconds=50)
    assert retention.prune_finished(USING, before) == (40, 0)
    assert left() == {job.pk for job in kept}


def test_a_job_that_cannot_go_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retention, "BATCH", 3)
    stuck, *_ = [*ended(30, 10), *ended(25, 10, count=9), *ended(30, 20, count=2)]
    with refusing("DELETE", "echomq_job", f"OLD.id = {stored_id(str(stuck.pk))}"):
        assert retention.prune_expired(USING) == (11, False)
        assert left() == {stuck.pk}
        ended(25, 10, count=9)
        before = timezone.now() - dt.timedelta(seconds=5)
        assert retention.prune_finished(USING, before) == (9, 1)
        assert left() == {stuck.pk}
        assert caplog.text.count(f"doing=prune item={stuck.pk}") == 2
        with pytest.raises(CommandError, match="1 jobs could not be deleted"):
            call_command("echomq_job", "prune", "--older-than", "1s")
    assert retention.prune_expired(USING) == (1, False)


def test_a_window_that_cannot_go_stops_no_other() -> None:
    for key in "ab":
        UniqueWindow.objects.create(key=key, job_id=new_job_id(), until=timezone.now())
    with refusing("DELETE", "echomq_uniquewindow", "OLD.key = 'a'"):
        retention.prune_windows(USING)
        assert list(UniqueWindow.objects.values_list("key", flat=True)) == ["a"]


@pytest.mark.postgres
def test_a_held_row_is_passed_over_and_goes_later() -> None:
    held, *_ = ended(30, 10, count=5)
    with session() as other:
        other.execute("BEGIN")
        other.execute("SELECT 1 FROM echomq_job WHERE id = %s FOR UPDATE", (held.pk.hex,))
        assert retention.prune_expired(USING) == (4, False)
        other.execute("ROLLBACK")
    assert retention.prune_expired(USING) == (1, False)


@pytest.mark.postgres
def test_no_claim_waits_for_a_batch() -> None:
    ended(20, 10, count=50)
    add.enqueue(1, 2)
    worker = register()
    with transaction.atomic():
        assert retention.prune_expired(USING) == (50, False)  # not committed yet
        (claimed,) = concurrently(lambda: claim(worker, 5))
        assert len(claimed) == 1
    assert Job.objects.count() == 1


def test_a_worker_deletes_what_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    from echomq_app.jobs import housekeeping

    monkeypatch.setattr(housekeeping, "RETENTION_INTERVAL", 0.1)
    with running_worker():
        kept = add.enqueue(1, 2)
        brief = add.using(retention=0).enqueue(1, 2)
        finished(kept.id)
        wait_until(lambda: not Job.objects.filter(pk=brief.id).exists())
    with pytest.raises(TaskResultDoesNotExist):
        add.get_result(brief.id)
    assert history(brief.id) == ["enqueued", "started", "completed"]
    assert add.get_result(kept.id).return_value == 3
