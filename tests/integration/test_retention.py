"""Retention in the background: what `apply_retention` removes, and what it leaves alone."""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.utils import timezone
from pytest_django.fixtures import Settings

from echomq_app.core.names import queue_stream
from echomq_app.exceptions import CursorExpired, UnknownStream
from echomq_app.models import MaintenanceTurn, Record, appending, expired, retention, sql, trimming
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Stream
from echomq_app.testing import fake_clock
from tests.costs import cost_of, entries_of, filled_by_sql, one_record_in_each, streams_by_sql
from tests.databases import concurrently, refusing, session

pytestmark = pytest.mark.django_db(transaction=True)


def filled(name: str, count: int = 10) -> Stream:
    stream = Stream(name)
    stream.append_many([{"data": n} for n in range(count)])
    return stream


def age_records(stream: Stream, below: int, by: dt.timedelta) -> None:
    """Make the first records old, behind the back of the trigger that forbids it."""
    rows = Record.objects.filter(stream__name=stream.name, position__lt=below)
    trigger = "echomq_record_no_update_v1"
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"ALTER TABLE echomq_record DISABLE TRIGGER {trigger}")
            rows.update(recorded_at=dt.datetime.now(dt.UTC) - by)
            cursor.execute(f"ALTER TABLE echomq_record ENABLE TRIGGER {trigger}")
        else:
            sql.remove(connection)
            rows.update(recorded_at=dt.datetime.now(dt.UTC) - by)
            sql.install(connection)


def test_each_stream_is_trimmed_to_its_own_policy_or_the_settings(settings: Settings) -> None:
    settings.ECHOMQ = {"RETENTION": {"logs.*": {"max_records": 3}}}
    own, by_pattern, kept = filled("own"), filled("logs.web"), filled("kept")
    own.set_retention(max_records=4)
    results = retention.apply_retention("default")
    assert [(r.stream, r.first_position, r.trimmed, r.dry_run) for r in results] == [
        ("logs.web", 7, 7, False),
        ("own", 6, 6, False),
    ]
    assert [r.data for r in own.read().records] == [6, 7, 8, 9]
    assert [r.data for r in by_pattern.read().records] == [7, 8, 9]
    assert kept.info().count == 10
    with pytest.raises(CursorExpired):
        own.read(0)
    assert Record.objects.filter(stream__name="own").count() == 4
    assert retention.apply_retention("default") == []


def test_age(settings: Settings) -> None:
    settings.ECHOMQ = {"RETENTION": {"*": {"max_age": 3600}}}
    stream, young = filled("old"), filled("young")
    age_records(stream, below=6, by=dt.timedelta(hours=2))
    (result,) = retention.apply_retention("default")
    assert (result.stream, result.first_position, result.trimmed) == ("old", 6, 6)
    assert stream.info().count == 4 and young.info().count == 10


def test_queue_streams_keep_a_week_by_default() -> None:
    name = queue_stream("emails")
    appending.append("default", name, [b'{"data":1}'] * 10)
    stream = Stream(name)
    age_records(stream, below=3, by=dt.timedelta(days=6))
    assert retention.apply_retention("default") == []
    age_records(stream, below=3, by=dt.timedelta(days=8))
    (result,) = retention.apply_retention("default")
    assert (result.first_position, result.trimmed) == (3, 3)


def test_dry_run_changes_nothing() -> None:
    stream = filled("orders")
    stream.set_retention(max_records=2)
    (result,) = retention.apply_retention("default", dry_run=True)
    assert (result.first_position, result.trimmed, result.dry_run) == (8, 8, True)
    assert stream.info().count == 10


def test_finishes_a_trim_that_was_killed_after_it_moved_the_first_position() -> None:
    stream = filled("orders")
    trimming.move_first_position("default", "orders", 5, epoch=stream.info().epoch)
    assert Record.objects.count() == 10
    assert retention.apply_retention("default") == []
    assert Record.objects.count() == 5
    assert stream.info().first_position == 5


def test_a_stream_deleted_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        stream = filled(name)
        age_records(stream, below=5, by=dt.timedelta(days=2))
        stream.set_retention(max_age=dt.timedelta(days=1))
    move = retention._move

    def delete_then_move(*args: Any) -> Any:
        Stream("a").delete()
        return move(*args)

    monkeypatch.setattr(retention, "_move", delete_then_move)
    assert [result.stream for result in retention.apply_retention("default")] == ["b"]
    with pytest.raises(UnknownStream):
        Stream("a").info()


@pytest.mark.parametrize("by", ["trim", "retention", "delete"])
def test_a_stream_made_anew_meanwhile_keeps_its_records(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was decided about positions of one life says nothing about the next one's."""
    stream = filled("orders", 100)
    stream.set_retention(max_records=10)
    module: Any = retention if by == "retention" else trimming
    name = "_move" if by == "retention" else "move_first_position"
    move = getattr(module, name)

    def after_another_life_began(*args: Any, **more: Any) -> Any:
        monkeypatch.setattr(module, name, move)
        stream.delete()
        stream.append("new")
        if by == "delete":  # killed right after this
            assert not move(*args, **more)
            raise KeyboardInterrupt
        return move(*args, **more)

    monkeypatch.setattr(module, name, after_another_life_began)
    if by == "trim":
        assert stream.trim(max_records=10).trimmed == 0
    elif by == "retention":
        assert retention.apply_retention("default") == []
    else:
        with pytest.raises(KeyboardInterrupt):
            stream.delete()
    assert [record.data for record in stream.read().records] == ["new"]
    assert stream.info().first_position == 0


class TestCosts:
    @pytest.mark.parametrize("rules", [{}, {"queue.*": {"max_age": 60}, "exact": {"max_age": 60}}])
    def test_streams_without_a_policy_cost_nothing(
        self, rules: dict[str, Any], settings: Settings
    ) -> None:
        settings.ECHOMQ = {"RETENTION": rules}
        filled("a").set_retention(max_records=100)
        streams_by_sql("few", 100)
        cheap = cost_of_turn()
        streams_by_sql("many", 20_000)
        assert cost_of_turn() <= 2 * cheap

    @pytest.mark.parametrize("rules", [{"*": {"max_age": 60}}, {"*0": {"max_records": 5}}])
    def test_a_turn_visits_so_many_streams_that_have_one(
        self, rules: dict[str, Any], settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings.ECHOMQ = {"RETENTION": rules}
        monkeypatch.setattr(retention, "VISITS", 200)
        streams_by_sql("few", 200)
        one_record_in_each()
        cheap = cost_of_turn()
        streams_by_sql("many", 10_000)
        assert cost_of_turn() <= 2 * cheap

    def test_a_snapshot_held_elsewhere_makes_no_chunk_slower(self) -> None:
        """Under it the index keeps an entry of every record that was deleted."""
        stream = filled_by_sql("orders", 20_000)
        with held_snapshot():
            chunks = [
                cost_of(partial(stream.trim, before=before))
                for before in range(2_000, 18_001, 2_000)
            ]
            assert chunks[-1] <= 1.5 * chunks[0]
            whole = entries_of(stream.delete)  # of 2,000, once to expire and once for the row
            assert whole <= 2 * chunks[0]

    def test_many_streams_with_a_little_to_trim_share_statements(
        self, django_assert_max_num_queries: Callable[..., Any]
    ) -> None:
        for number in range(20):
            filled(f"s{number:02}").set_retention(max_records=4)
        with django_assert_max_num_queries(25):
            results = retention.apply_retention("default")
        assert [result.trimmed for result in results] == [6] * 20
        assert Record.objects.count() == 20 * 4
        assert not StreamRow.objects.exclude(expired_from=None).exists()


class TestTurns:
    def test_one_worker_a_minute(self) -> None:
        stream = filled("orders")
        stream.set_retention(max_records=8)
        retention.take_turn("default")
        assert stream.info().count == 8
        stream.append_many([{"data": n} for n in range(5)])
        retention.take_turn("default")
        assert stream.info().count == 13
        with fake_clock() as clock:
            clock.advance(seconds=61)
            retention.take_turn("default")
        assert stream.info().count == 8

    def test_at_the_same_moment_one_of_them(self) -> None:
        MaintenanceTurn.objects.take("retention", dt.timedelta())  # it is due, and the row there
        turns = concurrently(
            *[lambda: MaintenanceTurn.objects.take("retention", dt.timedelta(minutes=1))] * 4
        )
        assert sorted(turns, key=str) == ["", None, None, None]

    def test_a_turn_set_by_a_clock_that_was_ahead_comes(self) -> None:
        minute = dt.timedelta(minutes=1)
        with fake_clock() as clock:
            clock.advance(hours=1)
            assert MaintenanceTurn.objects.take("retention", minute) == ""
        assert MaintenanceTurn.objects.take("retention", minute) == ""
        assert MaintenanceTurn.objects.take("retention", minute) is None

    def test_the_walk_goes_on_where_it_ended_and_begins_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retention, "VISITS", 2)
        streams = [filled(name) for name in "abcde"]
        for stream in streams:
            stream.set_retention(max_records=4)
        left = []
        for _ in range(4):
            due_now()
            retention.take_turn("default")
            left.append(sum(stream.info().count > 4 for stream in streams))
            if len(left) == 3:
                streams[0].append_many([{"data": n} for n in range(3)])
        assert left == [3, 1, 0, 0]

    def test_no_stream_waits_until_another_with_much_to_delete_is_done(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(retention, "DELETIONS", 1_000)
        large, small = filled_by_sql("large", 5_000), filled("small")
        for stream in (large, small):
            stream.set_retention(max_records=4)
        assert retention.take_turn("default")  # more to do
        assert (large.info().count, small.info().count) == (4, 4)  # as readers see it, at once
        assert Record.objects.filter(stream__name="small").count() == 4
        assert Record.objects.filter(stream__name="large").count() >= 3_000
        turns = 1
        while retention.take_turn("default"):
            turns += 1
            assert turns < 20
        assert Record.objects.count() == 8


class TestFailures:
    """What fails for one stream stops no other."""

    @pytest.fixture
    def refused(self) -> Iterator[Callable[[], None]]:
        """Deleting records of stream a fails."""
        for name in "abc":
            filled(name).set_retention(max_records=4)
        pk = StreamRow.objects.get(name="a").pk
        with refusing("DELETE", "echomq_record", f"OLD.stream_id = {pk}") as allow:
            yield allow

    def test_the_others_are_trimmed_and_the_result_names_it(
        self, refused: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        results = retention.apply_retention("default")
        assert [(r.stream, r.trimmed, bool(r.error)) for r in results] == [
            ("a", 6, True),
            ("b", 6, False),
            ("c", 6, False),
        ]
        assert stored("a") == 10 and stored("b") == stored("c") == 4
        (line,) = [r.getMessage() for r in caplog.records if "event=failed" in r.getMessage()]
        assert "doing=retention item=a" in line and "not today" in line

    def test_the_command_says_which(self, refused: None) -> None:
        with pytest.raises(CommandError, match=r"Could not trim a: .*not today"):
            call_command("echomq_stream", "trim", stdout=io.StringIO())
        assert stored("b") == stored("c") == 4

    def test_it_is_done_the_next_time(self, refused: Callable[[], None]) -> None:
        retention.apply_retention("default")
        refused()
        assert retention.apply_retention("default") == []
        assert stored("a") == 4

    @pytest.mark.postgres
    def test_chunks_shrink_until_they_are_in_time(self) -> None:
        filled_by_sql("orders", 400).set_retention(max_records=0)
        with connection.cursor() as cursor:
            cursor.execute(
                "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN PERFORM pg_sleep(0.005); RETURN OLD; END $$;"
                "CREATE TRIGGER slow BEFORE DELETE ON echomq_record FOR EACH ROW"
                " EXECUTE FUNCTION slow(); SET statement_timeout = '1s'"
            )
            try:
                (result,) = retention.apply_retention("default")
            finally:
                cursor.execute("RESET statement_timeout; DROP FUNCTION slow CASCADE")
        assert (result.trimmed, result.error) == (400, "") and stored("orders") == 0


def test_a_chunk_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expired, "CHUNK_BYTES", 50_000)
    stream = Stream("orders")
    stream.append_many([{"data": "x" * 20_000} for _ in range(9)])
    # Too random to be compressed.
    stream.append_many([{"data": random_text(20_000)} for _ in range(9)])
    sizes: list[int] = []
    delete = expired._delete_below

    def counted(*args: Any) -> int:
        sizes.append(delete(*args))
        return sizes[-1]

    monkeypatch.setattr(expired, "_delete_below", counted)
    stream.trim(max_records=0)
    assert stored("orders") == 0
    assert sum(sizes) == 18 and max(sizes[-4:]) <= 2


def cost_of_turn() -> int:
    """Return what a turn costs: not the first one, which makes its row."""
    costs = []
    for _ in range(2):
        due_now(place="")
        costs.append(cost_of(lambda: retention.take_turn("default")))
    return costs[-1]


def due_now(**changes: str) -> None:
    MaintenanceTurn.objects.update(due_at=timezone.now(), **changes)


def stored(name: str) -> int:
    return Record.objects.filter(stream__name=name).count()


def random_text(length: int) -> str:
    return random.Random(length).randbytes(length // 2).hex()


@contextlib.contextmanager
def held_snapshot() -> Iterator[None]:
    """Hold a snapshot open in another session; SQLite keeps nothing for one."""
    if connection.vendor != "postgresql":
        yield
        return
    with session() as other:
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT count(*) FROM echomq_record")
        yield
