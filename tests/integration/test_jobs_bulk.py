"""Many jobs with few statements: the same rows and records as one by one."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from echomq_app.exceptions import InvalidArgument, InvalidPayload
from echomq_app.jobs.arguments import BATCH, BATCH_BYTES
from echomq_app.jobs.bulk import aenqueue_many, call, enqueue_many
from echomq_app.jobs.tasks_api import task_enqueued
from echomq_app.models import Job
from tests import jobtasks
from tests.integration.jobs import hearing, history, records, running_worker
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

_OWN = {"id", "run_after", "enqueued_at"}


def row(id: str) -> dict[str, Any]:
    (values,) = Job.objects.filter(pk=id).values()
    return {name: value for name, value in values.items() if name not in _OWN}


def test_rows_and_records_are_those_of_one_by_one() -> None:
    task: Any = jobtasks.add.using(priority=3)
    task = task.using(group="g", concurrency=2, retention=60.0)
    with hearing() as heard:
        alone = task.enqueue(1, b=2)
        (many,) = enqueue_many(task, [call(1, b=2)])
        first, second = heard.so_far()
    assert (str(first.job_id), str(second.job_id)) == (alone.id, many.id)
    assert first.data.keys() == second.data.keys() and second.data["id"] == many.id
    assert row(many.id) == row(alone.id)
    (one,), (other,) = records(alone.id), records(many.id)
    assert one[0] == other[0] and one[1].keys() == other[1].keys()
    shown = {field.name for field in dataclasses.fields(many)} - {"id", "enqueued_at"}
    assert {name: getattr(many, name) for name in shown} == {
        name: getattr(alone, name) for name in shown
    }
    assert type(many) is type(alone) and type(many.enqueued_at) is type(alone.enqueued_at)
    third, fourth = enqueue_many(task, [call(1, b=2), call(1, b=2)])
    assert third.errors is not fourth.errors and third.worker_ids is not fourth.worker_ids


def test_in_the_order_of_the_calls_with_few_statements() -> None:
    signals: list[Any] = []

    def heard(task_result: Any, **more: Any) -> None:
        signals.append(task_result.id)

    task_enqueued.connect(heard)
    try:
        with CaptureQueriesContext(connection) as queries:
            results = enqueue_many(jobtasks.noop, (call(n) for n in range(2_500)))
    finally:
        task_enqueued.disconnect(heard)
    assert signals == [result.id for result in results] == sorted(signals)
    assert [result.args for result in results] == [[n] for n in range(2_500)]
    if connection.vendor == "postgresql":
        assert len([q for q in queries if "INSERT" in q["sql"]]) == 2_500 / BATCH
    stored = Job.objects.order_by("pk").values_list("arguments", flat=True)
    assert [arguments["args"][0] for arguments in stored] == list(range(2_500))


def test_all_or_none_and_nothing_before_the_commit() -> None:
    with pytest.raises(InvalidPayload):
        enqueue_many(jobtasks.noop, [call(1), call(float("nan"))])
    with hearing() as heard:
        with transaction.atomic():
            enqueue_many(jobtasks.noop, [call(1)])
            assert not heard.names()
            transaction.set_rollback(True)
        assert not Job.objects.exists() and not heard.names()
    assert enqueue_many(jobtasks.noop, []) == []


def test_from_a_query_on_the_same_connection() -> None:
    """One that is read as it goes, in the same transaction or in one that fails in between."""
    enqueue_many(jobtasks.noop, [call(n) for n in range(2 * BATCH)])

    def rows() -> Iterator[Any]:
        for number, job in enumerate(Job.objects.order_by("pk").iterator(chunk_size=100)):
            if number % 300 == 0:
                with pytest.raises(IntegrityError), transaction.atomic():
                    Job.objects.bulk_create([job])
            yield call(job.arguments["args"][0])

    with transaction.atomic():
        results = enqueue_many(jobtasks.noop.using(queue_name="u"), rows())
    assert [result.args for result in results] == [[n] for n in range(2 * BATCH)]


@pytest.mark.parametrize("unique", [False, True])
def test_refused_halfway_the_callers_transaction_goes_on_without_it(unique: bool) -> None:
    signals: list[Any] = []

    def heard(task_result: Any, **more: Any) -> None:
        signals.append(task_result.id)

    task: Any = jobtasks.noop
    task_enqueued.connect(heard)
    try:
        with transaction.atomic():
            with pytest.raises(InvalidPayload):
                enqueue_many(
                    task.using(unique=unique),
                    [*(call(n) for n in range(BATCH)), call(float("nan"))],
                )
            after = jobtasks.noop.enqueue(1)
    finally:
        task_enqueued.disconnect(heard)
    assert [str(job.pk) for job in Job.objects.all()] == signals == [after.id]


@pytest.mark.parametrize("unique", [False, True])
@pytest.mark.parametrize("wrong", ["ab", (1, 2), ({}, ()), ((1,), None), ((1,),), 5])
def test_what_is_no_call_is_refused(wrong: Any, unique: bool) -> None:
    task: Any = jobtasks.noop
    with pytest.raises(InvalidArgument, match="call"):
        enqueue_many(task.using(unique=unique), [call(1), wrong])
    assert not Job.objects.exists()


def test_long_calls_are_sent_in_short_statements() -> None:
    """Each is within the limit; five hundred of them wouldn't fit into one value."""
    long = "x" * (BATCH_BYTES // 5)
    calls = [call(n, "" if n % 3 else long) for n in range(20)]
    with CaptureQueriesContext(connection) as queries:
        results = enqueue_many(jobtasks.noop, calls)
    assert [tuple(result.args) for result in results] == [args for args, _ in calls]
    assert [job.arguments["args"] for job in Job.objects.order_by("pk")] == [
        result.args for result in results
    ]
    if connection.vendor == "postgresql":
        sent = [len(query["sql"]) for query in queries if "INSERT" in query["sql"]]
        assert max(sent) < 1.1 * BATCH_BYTES and 2 <= len(sent) <= 4


def test_what_django_makes_plain_is_made_plain_among_others() -> None:
    results = enqueue_many(jobtasks.noop, [call(1), call(b"raw", key=MappingProxyType({}))])
    assert [(result.args, result.kwargs) for result in results] == [
        ([1], {}),
        (["raw"], {"key": {}}),
    ]


@pytest.mark.postgres
def test_a_batch_that_the_database_refuses_takes_all_with_it() -> None:
    """Statements go without waiting for answers: the error comes with a later one's."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$BEGIN RAISE 'not this one' USING ERRCODE = '23514'; END$$;"
            "CREATE TRIGGER refuse BEFORE INSERT ON echomq_job FOR EACH ROW"
            " WHEN (NEW.arguments->'args'->>0 = '700') EXECUTE FUNCTION refuse()"
        )
    try:
        with hearing() as heard:
            with pytest.raises(IntegrityError, match="not this one"):
                enqueue_many(jobtasks.noop, [call(n) for n in range(3 * BATCH)])
            assert not Job.objects.exists() and not heard.names()
        enqueue_many(jobtasks.noop, [call(n) for n in range(700)])
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP FUNCTION refuse() CASCADE")
    assert Job.objects.count() == 700


def test_scheduled_unique_and_other_backends() -> None:
    due = timezone.now() + dt.timedelta(hours=1)
    later = enqueue_many(jobtasks.noop.using(run_after=due), [call(1)])
    assert [result.state for result in later] == ["scheduled"]
    unique: Any = jobtasks.noop.using(queue_name="u")
    first, second, third = enqueue_many(unique.using(unique=True), [call(1), call(2), call(1)])
    assert (first.duplicate, second.duplicate, third.duplicate) == (False, False, True)
    assert third.id == first.id
    foreign: Any = type("T", (), {"backend": "x", "get_backend": lambda self: object()})()
    with pytest.raises(InvalidArgument, match="can't enqueue many"):
        enqueue_many(foreign, [call(1)])


async def test_from_async_code() -> None:
    results = await aenqueue_many(jobtasks.noop, [call(n) for n in range(3)])
    assert await Job.objects.filter(pk__in=[result.id for result in results]).acount() == 3


def test_a_worker_is_woken_and_runs_them() -> None:
    with running_worker(poll=30):
        ids = [result.id for result in enqueue_many(jobtasks.noop, [call(n) for n in range(20)])]
        done = Job.objects.filter(pk__in=ids, state="completed")
        wait_until(lambda: done.count() == 20)
    assert [job.result for job in done.order_by("pk")] == list(range(20))
    assert history(ids[0]) == ["enqueued", "started", "completed"]


class TestReceiverThatRaises:
    """The jobs are there: who enqueues gets them, and other receivers hear."""

    @pytest.fixture
    def heard(self) -> Iterator[list[str]]:
        ids: list[str] = []

        def fails(**more: Any) -> None:
            raise ValueError("not today")

        def hears(task_result: Any, **more: Any) -> None:
            ids.append(task_result.id)

        task_enqueued.connect(fails)
        task_enqueued.connect(hears)
        try:
            yield ids
        finally:
            task_enqueued.disconnect(fails)
            task_enqueued.disconnect(hears)

    def test_keeps_no_result(self, heard: list[str], caplog: pytest.LogCaptureFixture) -> None:
        with transaction.atomic():
            one = jobtasks.noop.enqueue(1)
        many = enqueue_many(jobtasks.noop, [call(n) for n in range(3)])
        ids = [one.id, *(result.id for result in many)]
        assert heard == ids == [str(job.pk) for job in Job.objects.order_by("pk")]
        assert caplog.text.count("event=receiver_failed") == 4

    @pytest.mark.postgres
    def test_that_has_spoilt_the_callers_transaction_raises(self) -> None:
        """Otherwise its commit would be a rollback, without a word."""

        def spoils(**more: Any) -> None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1 / 0")

        task_enqueued.connect(spoils)
        try:
            with pytest.raises(DatabaseError, match="division"), transaction.atomic():
                jobtasks.noop.enqueue(1)
            assert not Job.objects.exists()
            jobtasks.noop.enqueue(1)
            assert Job.objects.exists()
        finally:
            task_enqueued.disconnect(spoils)
