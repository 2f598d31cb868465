"""A tour: everything that the package asks the database for, once or a few times, on large tables.

Look-ups ask for what isn't there, or is rare, as well: what finds its rows at once reads little
whatever its plan.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.db.models import Q
from django.test import Client
from django.utils import timezone

from echomq_app.admin import jobs, records
from echomq_app.core.records import StoredRecord
from echomq_app.exceptions import UnknownStream, WrongExpectedCursor
from echomq_app.jobs import control, housekeeping, retention, schedule
from echomq_app.jobs.bulk import call, enqueue_many
from echomq_app.jobs.claims import Claims
from echomq_app.jobs.health import report
from echomq_app.jobs.outcomes import Ending
from echomq_app.jobs.transitions import settle, write_progress
from echomq_app.models import CancelRequest, Job, JobState, Record, Worker
from echomq_app.models import Stream as StreamRow
from echomq_app.models.paging import read_stored_page
from echomq_app.stream import Stream, append_all
from echomq_app.testing import run_jobs
from tests import jobtasks
from tests.integration.jobs import USING, outcome, running_worker
from tests.large_tables import BIG, OLD
from tests.wait import wait_until

WINDOW = 2_000
"""Rows at which a filter of the admin looks at once: how many is their choice, not ours."""
QUEUES = ("default", "grouped", "none")
NOT_THERE = "JOB00000000000000000000000001"


def run(client: Client, held_snapshot: Callable[[], AbstractContextManager[object]]) -> None:
    """Take the tour. What deletes many rows does so while another session may still see them."""
    for step in (appends, reads, follows, enqueues, claims, cancels, looks_after_jobs, works):
        step()
        vacuum()
    commands()
    with mock.patch.object(jobs, "_WINDOW", WINDOW), mock.patch.object(records, "_WINDOW", WINDOW):
        admin(client)
    with held_snapshot():
        trims()


def vacuum() -> None:
    """Do what PostgreSQL does now and then: what was taken back has left rows, too."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("VACUUM echomq_job, echomq_outbox")


def appends() -> None:
    big = Stream(BIG)
    big.append({"n": 1})
    for key in ("new", "new", "once0"):
        big.append({"n": 1}, idempotency_key=key)
    keyed = [{"data": n, "idempotency_key": f"many{n}"} for n in range(50)]
    for _ in range(2):
        big.append_many([*keyed, {"data": 0}])
    with contextlib.suppress(WrongExpectedCursor):
        big.append({"n": 1}, expected_cursor=3)
    with transaction.atomic():
        big.append_on_commit({"n": 1}, idempotency_key="on commit")
        Stream("another").append_on_commit({"n": 1})
    append_all({BIG: [{"data": 1}], "s100": [{"data": 1}], "brand-new": [{"data": 1}]})
    for name in (BIG, "emq.busy"):
        Stream(name).relay(100)


def reads() -> None:
    big = Stream(BIG)
    filters: list[dict[str, Any]] = [{}, {"types": ["t1"]}, {"types": ["none"]}, {"key": "k5"}]
    filters += [{"key": "none"}, {"types": ["none"], "key": "k5"}, {"types": ["none"], "key": ""}]
    for cursor, filter in itertools.product((None, 75_000, big.info().token), filters):
        big.read(cursor, limit=50, **filter)
        place = cursor if isinstance(cursor, int) else None
        options = {"limit": 50, "window": 10_000, "with_pending": True, **filter}
        read_stored_page(USING, BIG, place, StoredRecord, **options)
    now = timezone.now()
    at = now - dt.timedelta(days=1)
    assert big.cursor_at(at) < big.cursor_at(now)
    next(iter(big.window(at, now)))
    with contextlib.suppress(UnknownStream):
        Stream("not-there").read()


def follows() -> None:
    for name, cursor in (("followed", None), (BIG, 200_000)):
        Stream(name).append({"n": 1})
        next(iter(Stream(name).tail_pages(cursor)))


def enqueues() -> None:
    for task in (jobtasks.add, jobtasks.add.using(run_after=timezone.now() + dt.timedelta(1))):
        result = task.enqueue(1, 2)
        result.refresh()
    with contextlib.suppress(Exception):
        jobtasks.add.get_result(NOT_THERE)
    enqueue_many(jobtasks.add, [call(1, 2)] * 50)
    options: list[dict[str, Any]] = [{"unique": "key"}, {"unique": "window", "unique_for": 60}]
    for given in [*options, {"group": "full", "concurrency": 1}]:
        for _ in range(2):
            jobtasks.add.using(**given).enqueue(1, 2)


def claims() -> None:
    worker = Worker.objects.get(pk=302)
    front = Claims(USING)
    taken = []
    for queue in ("default", "default", "grouped", "none"):
        taken += front.take(queue, worker_id=worker.pk, worker_name=worker.name, limit=20)
    Worker.objects.heartbeat(worker.pk, 60)
    CancelRequest.objects.for_worker(worker.pk)
    write_progress(USING, [(job.id, job.fence, 0.5, "half") for job in taken[:5]])
    endings = itertools.cycle((Ending.RETURNED, Ending.RAISED, Ending.HANDED_BACK))
    settle(USING, [outcome(job, ending) for job, ending in zip(taken, endings, strict=False)])


def cancels() -> None:
    found = Job.objects.order_by("pk")
    for state in JobState:
        job = found.filter(state=state)[100 if state not in {"running"} else 2]
        control.cancel(job.pk, "why")
        control.retry(job.pk)
    for where in (Q(queue="none"), Q(task_path="none"), Q(group_key="group:none")):
        control.cancel_many(where)
    control.cancel_many(Q(pk__in=[job.pk for job in found.filter(state=JobState.READY)[:50]]))
    control.pause("default")
    control.paused()
    Claims(USING).take("default", worker_id=302, worker_name="w302", limit=20)
    control.resume("default")


def looks_after_jobs() -> None:
    """Look at the queues, and do what workers do now and then."""
    report(QUEUES)
    report(["grouped"])
    Worker.objects.filter(pk=301).update(expires_at=timezone.now() - dt.timedelta(60))
    for _ in range(2):  # the second time, there is nothing to do
        one_turn_of_the_housekeeper()
    every = schedule.Entry(
        name="every", task="tests.jobtasks.noop", cron="* * * * *", timezone="UTC", args=[1]
    )
    now = timezone.now()
    schedule.sync(USING, [every], now)
    schedule.run_due(USING, [every], now + dt.timedelta(minutes=2))
    retention.prune_expired(USING, timezone.now() + dt.timedelta(days=7, hours=6))
    retention.prune_finished(USING, timezone.now() - dt.timedelta(days=2, hours=18))
    Worker.objects.prune()
    run_jobs("none")


def one_turn_of_the_housekeeper() -> None:
    with mock.patch.object(housekeeping, "RETENTION_INTERVAL", 0.0):
        keeper = housekeeping.Housekeeper(
            USING, QUEUES, interval=60, patience=300, on_ready=lambda: None
        )
        keeper.start()
        wait_until(lambda: keeper._schedules is not None, 60, "the turn has begun")
        keeper.close(timeout=300)


def works() -> None:
    """Let a worker do a few jobs in its own threads."""
    jobtasks.add.using(queue_name="work").enqueue(1, 2)
    last = jobtasks.add.using(queue_name="work").enqueue(1, 2)
    with running_worker(queues=("work", "grouped")):
        wait_until(lambda: Job.objects.get(pk=last.id).is_finished, 60, "the job is done")
    with running_worker(queues=("none",), drain=True) as worker:
        wait_until(lambda: worker._stop.closed, 60, "the worker has ended by itself")


def commands() -> None:
    job = str(Job.objects.filter(state=JobState.FAILED).order_by("pk")[7].pk)
    for words in (
        "stream list --prefix s1000",
        "stream info big",
        "stream append big 1 --idempotency-key command",
        "stream read big --types none --limit 10",
        "stream read big --last 10 --key k5",
        "stream tail big --from 199990 --exit-at-end",
        "stream export s100",
        "stream trim s100 --max-records 1 --dry-run",
        "stream relay brand-new",
        "stream delete s101 --no-input",
        "job list",
        "job list --queue none",
        "job list --queue default",
        "job list --task none",
        "job list --group none",
        *(f"job list --state {state}" for state in JobState.values),
        f"job show {job}",
        f"job retry {job}",
        f"job cancel {job}",
        "job cancel --queue none",
        "job prune --older-than 60d",
        "queue list",
        "queue pause none",
        "queue resume none",
        "health --queue default --max-age 1 --max-backlog 10",
    ):
        command(words)


def command(words: str) -> None:
    name, *given = words.split()
    with contextlib.suppress(CommandError):
        call_command(f"echomq_{name}", *given, stdout=io.StringIO(), stderr=io.StringIO())


def admin(client: Client) -> None:
    record, stream = Record.objects.filter(stream=1)[0], StreamRow.objects.get(name=BIG)
    job = Job.objects.filter(state=JobState.FAILED).order_by("pk")[9]
    running = Job.objects.filter(state=JobState.RUNNING)[0]
    day = f"{timezone.now() - dt.timedelta(hours=12):%Y-%m-%d %H:%M}"
    for address in (
        *("", "record/", "record/?stream=big", "record/?stream=big&type=none"),
        *("record/?stream=big&key=k5", "record/?stream=big&key=none", "record/?stream=none"),
        *("record/?stream=big&type=none&key=k5", "record/?stream=big&below=75000"),
        *("record/?stream=big&above=75000", "record/?stream=big&type=none&below=75000"),
        *("record/?stream=big&type=none&above=75000", "record/?stream=big&key=k5&below=75000"),
        *(f"record/?go={record.pk}", f"record/?stream=big&go={day}", f"record/?go={day}"),
        *(f"record/?below={record.pk}", f"record/{record.pk}/change/"),
        *("stream/", "stream/?name=s1000", "stream/?below=s5", f"stream/{stream.pk}/change/"),
        *("job/", "job/?queue=none", "job/?task=none", "job/?state=failed&queue=none"),
        *(f"job/?state={state}" for state in JobState.values),
        *(f"job/?below={job.pk}", f"job/?above={job.pk}", f"job/?go={job.pk}"),
        *(f"job/{one.pk}/change/" for one in (job, running)),
        *(f"job/cancel/?id={running.pk}", f"job/retry/?id={job.pk}"),
        *("worker/", "worker/?alive=on", "worker/301/change/"),
        *("queue/", "queue/?name=none", "schedule/", "queue/q7/change/"),
    ):
        answer = client.get(f"/admin/echomq/{address}", follow=True)
        assert answer.status_code == 200, address
    client.post(f"/admin/echomq/stream/{stream.pk}/trim/", {"max_records": "100000"})
    client.post(f"/admin/echomq/job/cancel/?id={running.pk}", {"reason": "enough"})
    client.post(f"/admin/echomq/job/retry/?id={job.pk}")


def trims() -> None:
    old = Stream(OLD)
    old.trim(max_age=dt.timedelta(days=1), dry_run=True)
    old.trim(max_records=15_000)
    old.set_retention(max_records=10_000)
    old.trim()
    old.rotate_epoch()
    old.set_retention(max_records=5_000)
    for options in ("--dry-run", "", ""):
        command(f"stream trim {options}")
    old.delete()
