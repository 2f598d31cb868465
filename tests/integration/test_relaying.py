"""The relay's floor: nothing that commits late is overtaken, and what is dead costs nothing."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction

from echomq_app.core.ids import new_job_id
from echomq_app.jobs import control
from echomq_app.jobs.bulk import call, enqueue_many
from echomq_app.jobs.relayer import Relayer
from echomq_app.jobs.transitions import settle
from echomq_app.models import Outbox, Record
from echomq_app.models import Stream as StreamRow
from echomq_app.models.each import LONGEST_REST
from echomq_app.models.job import TASK_PATH_MAX
from echomq_app.models.relaying import FRONT_INTERVAL, FRONT_SHARE, KEYS, Relay, count_waiting
from echomq_app.stream import Stream
from tests import jobtasks
from tests.databases import refusing, session
from tests.integration.jobs import USING, claim, outcome, register
from tests.wait import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.postgres]

STREAM = "emq.default"
INSERT = (
    "INSERT INTO echomq_outbox (stream, record, xact)"
    " SELECT %s, jsonb_build_object('data', %s::text), NULL WHERE pg_current_xact_id() IS NOT NULL"
    " RETURNING id"
)


def insert(what: str, cursor: Any = None) -> int:
    with connection.cursor() as own:
        used = (cursor or own).execute(INSERT, (STREAM, what))
        (number,) = (used or own).fetchone()
    return int(number)


def moved() -> list[Any]:
    records = Record.objects.filter(stream_id__gt=0).order_by("position")
    return list(records.values_list("data", flat=True))


def test_what_commits_late_is_not_overtaken_by_what_follows_from_it() -> None:
    relay = Relay(USING, STREAM)
    with session() as other:
        other.execute("BEGIN")
        late = insert("late", other)
        for n in range(20):
            insert(str(n))
            assert relay.move(10) == 1
        assert relay.floor < late
        other.execute("COMMIT")
    insert("after")
    assert relay.move(10) == 2
    assert moved() == [*map(str, range(20)), "late", "after"]
    for _ in range(3):
        insert("more")
        relay.move(10)
    assert relay.floor > late


def test_under_a_held_snapshot_it_begins_behind_what_it_has_moved() -> None:
    relay = Relay(USING, STREAM)
    with session() as holder:
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM echomq_outbox")
        for _ in range(5):
            last = [insert("x") for _ in range(10)][-1]
            while relay.move(4):
                pass
            assert not Outbox.objects.exists()
        assert relay.floor > last - 10
        holder.execute("ROLLBACK")


def test_a_relay_that_finds_the_stream_held_learns_nothing() -> None:
    relay = Relay(USING, STREAM)
    insert("x")
    assert relay.move(10) == 1
    insert("y")
    with session() as other:
        other.execute("BEGIN")
        other.execute("SELECT 1 FROM echomq_stream WHERE name = %s FOR UPDATE", (STREAM,))
        assert relay.move(10) is None
        other.execute("ROLLBACK")
    assert relay.move(10) == 1 and moved() == ["x", "y"]


def insert_below(last: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO echomq_outbox (id, stream, record, xact) OVERRIDING SYSTEM VALUE"
            ' VALUES (%s, %s, \'{"data": "low"}\', NULL)',
            (last - 3, STREAM),
        )


def test_a_row_below_the_floor_is_found_from_the_front() -> None:
    """As after a restore: the numbers begin anew."""
    now = [0.0]
    relay = Relay(USING, STREAM, clock=lambda: now[0])
    for _ in range(4):
        last = insert("x")
        relay.move(10)
    insert_below(last)
    assert relay.move(10) == 0
    now[0] += FRONT_INTERVAL
    assert relay.move(10) == 1 and moved()[-1] == "low"


def test_a_front_that_is_slow_is_looked_at_more_seldom() -> None:
    now, passes = [0.0], [1.0]

    def clock() -> float:
        now[0] += passes[0]
        return now[0]

    relay = Relay(USING, STREAM, clock=clock)
    insert("x")
    relay.move(10)  # takes a second
    passes[0] = 0.0
    ended = now[0]
    for _ in range(4):
        last = insert("x")
        relay.move(10)
    insert_below(last)
    now[0] = ended + 0.99 / FRONT_SHARE
    assert relay.move(10) == 0
    now[0] = ended + 1.0 / FRONT_SHARE
    assert relay.move(10) == 1 and moved()[-1] == "low"


@pytest.fixture
def only_in_numbered_transactions() -> Iterator[None]:
    """Have the outbox refuse to draw an id where the transaction has no number yet."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE SEQUENCE drawn; SELECT setval('drawn', 1000000);"
            "CREATE FUNCTION draw() RETURNS bigint LANGUAGE plpgsql AS $$BEGIN"
            " IF pg_current_xact_id_if_assigned() IS NULL THEN RAISE 'no number yet'; END IF;"
            " RETURN nextval('drawn'); END$$;"
            "ALTER TABLE echomq_outbox ALTER id DROP IDENTITY;"
            "ALTER TABLE echomq_outbox ALTER id SET DEFAULT draw()"
        )
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(
                "ALTER TABLE echomq_outbox ALTER id DROP DEFAULT;"
                "ALTER TABLE echomq_outbox ALTER id ADD GENERATED BY DEFAULT AS IDENTITY;"
                "SELECT setval(pg_get_serial_sequence('echomq_outbox', 'id'), 2000000);"
                "DROP FUNCTION draw; DROP SEQUENCE drawn"
            )


@pytest.mark.usefixtures("only_in_numbered_transactions")
def test_whoever_writes_to_the_outbox_has_a_number_before_it_draws_an_id() -> None:
    with pytest.raises(DatabaseError, match="no number yet"), connection.cursor() as cursor:
        cursor.execute("INSERT INTO echomq_outbox (stream, record) VALUES ('x', '{}')")
    add: Any = jobtasks.add
    worker = register()
    with transaction.atomic():
        Stream("mine").append_on_commit({"n": 1})
    add.enqueue(1, 1)
    (claimed,) = claim(worker)
    settle(USING, [outcome(claimed)])
    for task in (
        add.using(unique=True),
        add.using(unique="window", unique_for=60.0),
        add.using(group="g"),
    ):
        task.enqueue(2, 2)
    cancelled = enqueue_many(add, [call(n, n) for n in range(3)])[-1].id
    assert control.cancel(cancelled) == "cancelled"
    assert count_waiting(USING, 100) == 10


def insert_many(cursor: Any, keys: list[str], **data: Any) -> None:
    cursor.execute(
        "INSERT INTO echomq_outbox (stream, record, keys, xact)"
        " SELECT %s, jsonb_build_object('type', 'x', 'data', %s::jsonb), %s, NULL"
        " WHERE pg_current_xact_id() IS NOT NULL",
        (STREAM, json.dumps(data), ",".join(keys)),
    )


def test_a_row_of_many_jobs_becomes_a_record_for_each_in_its_place() -> None:
    keys = [str(new_job_id()) for _ in range(5)]
    insert("before")
    with connection.cursor() as cursor:
        insert_many(cursor, keys[:3], n=1)
        insert_many(cursor, keys[3:], n=2)
    insert("after")
    assert count_waiting(USING, 100) == 7
    assert Relay(USING, STREAM).move(100) == 7
    told = list(Record.objects.order_by("position").values_list("type", "key", "data"))
    assert told == [
        ("", "", "before"),
        *(("x", key, {"n": 1 if key in keys[:3] else 2, "id": key}) for key in keys),
        ("", "", "after"),
    ]
    assert not Outbox.objects.exists()


def test_many_jobs_of_a_row_count_and_are_moved_whole() -> None:
    keys = [str(new_job_id()) for _ in range(6)]
    with connection.cursor() as cursor:
        insert_many(cursor, keys)
        insert_many(cursor, keys)
    relay = Relay(USING, STREAM)
    for _ in range(3):
        insert("x")
    assert [relay.move(4), relay.move(7), relay.move(7), relay.move(7)] == [6, 7, 2, 0]
    assert moved()[-3:] == ["x", "x", "x"]


def test_rows_of_many_jobs_stay_small_enough_not_to_be_compressed() -> None:
    longest = "t" * TASK_PATH_MAX
    with connection.cursor() as cursor:
        keys = [str(new_job_id()) for _ in range(KEYS)]
        insert_many(cursor, keys, task=longest, at="2026-11-30T07:24:58.123456+00:00")
        cursor.execute(
            "SELECT pg_column_compression(keys), pg_column_compression(record),"
            " pg_relation_size(reltoastrelid)"
            " FROM echomq_outbox, pg_class WHERE pg_class.oid = 'echomq_outbox'::regclass"
        )
        assert cursor.fetchone() == (None, None, 0)


def test_the_command_moves_the_others_where_one_stream_fails() -> None:
    insert("x")
    with connection.cursor() as cursor:
        cursor.execute(INSERT.replace("'data'", "'no data'"), ("emq.a", "x"))
    with pytest.raises(CommandError, match=r"Could not relay emq\.a: "):
        call_command("echomq_stream", "relay", stdout=io.StringIO())
    assert moved() == ["x"]
    assert list(Outbox.objects.values_list("stream", flat=True)) == ["emq.a"]


def test_a_stream_that_takes_no_records_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    """It costs the others no pause and no connection, and rests between its failures."""
    task: Any = jobtasks.add
    task.using(queue_name="a").enqueue(1, 2)
    assert Stream("emq.a").relay() == 1
    pk = StreamRow.objects.get(name="emq.a").pk
    task.using(queue_name="a").enqueue(1, 2)
    with refusing("INSERT", "echomq_record", f"NEW.stream_id = {pk}") as allow:
        relayer = Relayer(USING, ["a", "b"], patience=30)
        relayer.start()
        try:
            begun = time.monotonic()
            for number in range(1, 101):
                task.using(queue_name="b").enqueue(1, 2)
                relayer.soon()
                good = Record.objects.exclude(stream=pk)
                wait_until(lambda n=number, good=good: good.count() == n)  # type: ignore[misc]
            seconds = time.monotonic() - begun
            failures = caplog.text.count("doing=relay item=emq.a")
            assert 1 <= failures < 10 + seconds / LONGEST_REST
            allow()
            wait_until(lambda: Record.objects.filter(stream=pk).count() == 2)
        finally:
            relayer.close(timeout=20)
    assert "event=worker_error" not in caplog.text
