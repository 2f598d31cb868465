"""In every loop over many, one that fails stops none of the others."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.signals import user_logged_out
from django.db import OperationalError, transaction
from django.db.models import Q
from django.http import HttpRequest
from django.utils import timezone

from echomq_app.core.names import queue_stream
from echomq_app.engine.switchboard import Switchboard
from echomq_app.jobs import bulk, control, housekeeping, retention, schedule
from echomq_app.jobs.connections import service_connection
from echomq_app.jobs.relayer import Relayer
from echomq_app.jobs.tasks_api import task_enqueued
from echomq_app.jobs.wakeup import Wakeup
from echomq_app.live import logouts
from echomq_app.models import Job, Outbox, Schedule
from echomq_app.models.each import LONGEST_REST, Rests, for_each
from echomq_app.stream import Stream
from tests import jobtasks
from tests.databases import database_alias, refusing
from tests.integration.jobs import USING, running_worker, stored_id
from tests.integration.test_jobs_retention import ended, left
from tests.integration.test_jobs_schedule import MINUTE, NOON, made
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

add: Any = jobtasks.add


def test_schedules_that_are_due(caplog: pytest.LogCaptureFixture) -> None:
    ours = [made(name) for name in ("a", "b", "c")]
    schedule.sync(USING, ours, NOON)
    with refusing("UPDATE", "echomq_schedule", "OLD.name = 'b' AND NEW.next_at <> OLD.next_at"):
        assert schedule.run_due(USING, ours, NOON + MINUTE) == 30.0
    assert "doing=schedule item=b" in caplog.text
    assert set(Schedule.objects.exclude(last_at=None).values_list("name", flat=True)) == {"a", "c"}
    schedule.run_due(USING, ours, NOON + MINUTE)
    assert Job.objects.count() == 3


def test_queues_with_jobs_that_are_due(caplog: pytest.LogCaptureFixture) -> None:
    soon = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
    for queue in ("default", "mail", "other"):
        add.using(queue_name=queue, run_after=soon).enqueue(1, 2)
    Job.objects.update(run_after=soon - 2 * dt.timedelta(hours=1))
    with refusing("UPDATE", "echomq_job", "OLD.queue = 'mail'"):
        assert housekeeping.promote(USING, ["default", "mail", "other"]) == {"default", "other"}
    assert "doing=promote item=mail" in caplog.text
    assert housekeeping.promote(USING, ["default", "mail", "other"]) == {"mail"}


def test_queues_of_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    bad = add.using(queue_name="default").enqueue(1, 2)
    with refusing("UPDATE", "echomq_job", "OLD.queue = 'default'") as allow:
        with running_worker(queues={"default": 1, "mail": 1}):
            good = add.using(queue_name="mail").enqueue(3, 4)
            wait_until(lambda: Job.objects.get(pk=good.id).state == "completed")
            assert Job.objects.get(pk=bad.id).state == "ready"
            allow()
            wait_until(lambda: Job.objects.get(pk=bad.id).state == "completed")
    assert "doing=claim item=default" in caplog.text


def test_jobs_whose_time_is_over(caplog: pytest.LogCaptureFixture) -> None:
    jobs = [*ended(30, 10, count=3), *ended(20, 5, count=2)]
    with refusing("DELETE", "echomq_job", f"OLD.id = {stored_id(str(jobs[0].pk))}"):
        assert retention.prune_expired(USING) == (4, False)
        assert left() == {jobs[0].pk}
        assert retention.prune_finished(USING, timezone.now()) == (0, 1)
    assert caplog.text.count(f"doing=prune item={jobs[0].pk}") == 2
    assert retention.prune_expired(USING) == (1, False)


def test_jobs_to_cancel(caplog: pytest.LogCaptureFixture) -> None:
    ids = [add.enqueue(1, n).id for n in range(4)]
    with refusing(
        "UPDATE", "echomq_job", f"OLD.id = {stored_id(str(Job.objects.earliest('pk').pk))}"
    ):
        done = control.cancel_many(Q())
    assert (done.cancelled, done.failed) == (3, 1)
    assert "doing=cancel item=" in caplog.text
    states = [Job.objects.get(pk=id).state for id in sorted(ids)]
    assert states == ["ready", "cancelled", "cancelled", "cancelled"]


@pytest.mark.postgres
def test_streams_of_the_outbox(caplog: pytest.LogCaptureFixture) -> None:
    for queue in ("default", "mail"):
        add.using(queue_name=queue).enqueue(1, 2)
    Stream("mine").append(0)
    relayer = Relayer(USING, ["default", "mail"], patience=30.0)
    relayer._rests = Rests(clock=lambda: 0.0)
    wakeup = Wakeup()
    bad = f"OLD.stream = '{queue_stream('default')}'"
    with service_connection(USING, "relayer", wakeup, patience=30.0) as persistent:
        with refusing("DELETE", "echomq_outbox", bad):
            relayer._turn(persistent)
            relayer._turn(persistent)
            assert persistent._failures == 0, "no pause, and no new connection"
        assert caplog.text.count("doing=relay item=emq.default") == 1, "it rests"
        assert {row.stream for row in Outbox.objects.all()} == {"emq.default"}
        relayer._rests = Rests()
        relayer._turn(persistent)
    assert not Outbox.objects.exists()
    wakeup.close()


@pytest.fixture
def broken_receiver() -> Iterator[None]:
    def breaks(**kwargs: Any) -> None:
        raise LookupError("a receiver")

    task_enqueued.connect(breaks)
    yield
    task_enqueued.disconnect(breaks)


@pytest.mark.usefixtures("broken_receiver")
def test_results_of_jobs_whose_receiver_raises(caplog: pytest.LogCaptureFixture) -> None:
    results = bulk.enqueue_many(add, [((1, n), {}) for n in range(3)])
    assert len(results) == 3
    assert add.enqueue(1, 2).id
    assert Job.objects.count() == 4
    assert caplog.text.count("event=receiver_failed") == 4


def test_pages_of_a_user_who_logs_out(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Any] = []

    def breaks(pk: Any) -> None:
        told.append(pk)
        raise LookupError(pk)

    ends = [logouts.on_logout(partial(breaks)), logouts.on_logout(partial(breaks))]
    user = get_user_model().objects.create_user("ann")
    try:
        user_logged_out.send(type(user), request=HttpRequest(), user=user)
    finally:
        for end in ends:
            end()
    assert told == [user.pk, user.pk]
    assert caplog.text.count("event=logout_callback_failed") == 2


def test_sinks_of_a_group(caplog: pytest.LogCaptureFixture) -> None:
    class Sink:
        def __init__(self) -> None:
            self.heard: list[str] = []

        def deliver(self, message: Mapping[str, Any]) -> None:
            self.heard.append("message")
            raise LookupError

        def gap(self, reason: str) -> None:
            self.heard.append(reason)
            raise LookupError

    caplog.set_level(logging.ERROR)
    switchboard, sinks = Switchboard(), [Sink(), Sink()]
    for sink in sinks:
        switchboard.add("group", sink)
    assert switchboard.deliver("group", {}) == switchboard.deliver("group", {}) == 2
    switchboard.gap("lost")
    assert [sink.heard for sink in sinks] == [["message", "message", "lost"]] * 2
    assert caplog.text.count("event=sink_failed") == 2, "each stands in the log once"


@pytest.mark.sqlite
def test_lock_of_sqlite_is_not_waited_for_by_each() -> None:
    """It has one writer: the others would wait as long, and in vain."""
    tried: list[int] = []

    def write(some: Sequence[int]) -> None:
        tried.extend(some)
        Job.objects.using("impatient").update(priority=1)

    with (
        database_alias("impatient", OPTIONS={"timeout": 0.01}),
        transaction.atomic(),
    ):
        Job.objects.update(priority=2)
        with pytest.raises(OperationalError, match="locked"):
            for_each("impatient", [1, 2, 3], write, doing="test")
    assert tried == [1]


def test_what_fails_again_and_again_rests_longer_each_time() -> None:
    clock, failing = [0.0], ["bad"]
    tried: dict[str, list[float]] = {"good": [], "bad": []}

    def work(some: Sequence[str]) -> None:
        (which,) = some
        tried[which].append(clock[0])
        if which in failing:
            raise LookupError

    rests: Rests[str] = Rests(clock=lambda: clock[0])
    assert rests.pause(60.0) == 60.0
    for clock[0] in (0.0, 0.04, 0.06, 0.12, 0.17):
        rests.for_each(USING, ["bad", "good"], work, doing="test")
        assert rests.pause(60.0) < 0.25
    assert tried == {"bad": [0.0, 0.06, 0.17], "good": [0.0, 0.04, 0.06, 0.12, 0.17]}
    for clock[0] in range(1, 100):
        rests.for_each(USING, ["bad"], work, doing="test")
        assert rests.pause(60.0) <= LONGEST_REST
    failing.clear()
    clock[0] = 200.0
    assert rests.for_each(USING, ["bad"], work, doing="test")
    assert rests.pause(60.0) == 60.0


def test_exit_in_a_receiver_is_whose_enqueues() -> None:
    """A signal handler of its process may have raised it, as servers' do."""

    def exits(**kwargs: Any) -> None:
        raise SystemExit

    task_enqueued.connect(exits)
    try:
        with pytest.raises(SystemExit):
            add.enqueue(1, 2)
    finally:
        task_enqueued.disconnect(exits)
