"""Readers that go on: under retention, deletes, held snapshots and other time zones."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, transaction

from echomq_app.cancel import CancelToken
from echomq_app.core.names import stream_wake_group
from echomq_app.engine.process import engine
from echomq_app.exceptions import (
    CursorExpired,
    CursorInvalid,
    InsideTransaction,
    UnknownStream,
)
from echomq_app.models import Record, retention
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Page, Stream
from tests.databases import concurrently, in_thread, session
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def filled(count: int, name: str = "orders") -> Stream:
    stream = Stream(name)
    stream.append_many([{"data": {"n": n}} for n in range(count)])
    return stream


class TestTail:
    def test_catches_up_then_waits_for_more(self) -> None:
        stream, stop = filled(3), CancelToken()
        seen: list[int] = []

        def follow() -> None:
            for record in stream.tail(stop=stop):
                seen.append(record.data["n"])
                if record.data["n"] == 5:
                    stop.cancel()

        with in_thread(follow) as following:
            wait_until(lambda: len(seen) == 3)
            for n in range(3, 6):
                stream.append({"n": n})
                wait_until(lambda n=n: len(seen) == n + 1)  # type: ignore[misc]
            following.result(30)
        assert seen == list(range(6))

    def test_stops_while_it_waits(self) -> None:
        stop = CancelToken()
        with in_thread(lambda: list(Stream("orders").tail(stop=stop))) as following:
            wait_until(lambda: engine._switchboard.wants(stream_wake_group("orders")))
            stop.cancel()
            assert following.result(30) == []

    def test_waits_for_a_stream_and_creates_none(self) -> None:
        with in_thread(lambda: next(Stream("new").tail())) as following:
            wait_until(lambda: engine._switchboard.wants(stream_wake_group("new")))
            assert not StreamRow.objects.exists()
            Stream("new").append({"n": 0})
            assert following.result(30).position == 0

    def test_refuses_inside_a_transaction(self) -> None:
        with transaction.atomic(), pytest.raises(InsideTransaction, match=r"read\(\)"):
            next(Stream("orders").tail())

    @pytest.mark.parametrize("cursor", [5, "0123456789abcdef:0:", "garbage", 2**70])
    def test_a_place_in_a_stream_that_is_not_there_makes_none(self, cursor: int | str) -> None:
        with pytest.raises(UnknownStream):
            next(Stream("orders").tail(cursor))
        assert not StreamRow.objects.exists()

    def test_a_reader_of_a_deleted_stream_does_not_bring_it_back(self) -> None:
        stream = filled(3)
        token = stream.read(limit=2).token
        stream.delete()
        with pytest.raises(UnknownStream):
            next(stream.tail(token))
        assert not StreamRow.objects.exists()
        filled(3)
        with pytest.raises(CursorInvalid, match="epoch"):
            next(stream.tail(token))

    def test_the_first_page_of_a_filter_that_matches_nothing_has_a_place_to_resume(self) -> None:
        stream = filled(10)
        page = next(stream.tail_pages(types=["none"]))
        assert (page.records, page.cursor) == ([], 10)


class TestRetention:
    def test_at_write_speed_ends_in_expired_and_never_in_a_jump(self) -> None:
        """A reader that is slower than writer and trim: each page waits for both."""
        stream = filled(10)
        seen: list[int] = []
        reads, written, done = threading.Event(), threading.Event(), threading.Event()

        def write() -> None:
            n = 10
            assert reads.wait(30)
            while not done.is_set():
                stream.append_many([{"data": {"n": n + more}} for more in range(25)])
                n += 25
                stream.trim(max_records=60)
                written.set()

        def read() -> CursorExpired:
            try:
                for page in stream.tail_pages(limit=20):
                    seen.extend(record.data["n"] for record in page.records)
                    written.clear()
                    reads.set()
                    written.wait(30)
            except CursorExpired as error:
                return error
            finally:
                done.set()
            raise AssertionError("the reader was never overtaken")

        _, error = concurrently(write, read)
        assert isinstance(error, CursorExpired)
        assert seen == list(range(len(seen)))
        assert error.requested == len(seen) >= 10
        assert error.missed == error.first_position - error.requested > 0

    def test_replay_that_is_overtaken(self) -> None:
        stream = filled(2_500)
        records = stream.replay()
        for _ in range(10):
            next(records)
        stream.trim(before=2_000)
        with pytest.raises(CursorExpired) as caught:
            list(records)
        assert caught.value.requested == 1_000

    def test_trim_to_just_the_readers_place_misses_nothing(self) -> None:
        stream = filled(10)
        token = stream.read(limit=4).token
        stream.trim(before=4)
        assert [record.data["n"] for record in stream.read(token).records] == [4, 5, 6, 7, 8, 9]


@pytest.mark.postgres
def test_retention_passes_over_a_stream_that_an_open_transaction_holds() -> None:
    """It runs in the thread that also rescues jobs, in every worker."""
    for name in ("a", "b", "c"):
        filled(10, name).set_retention(max_records=4)
    with session() as stopped:
        stopped.execute("BEGIN")
        stopped.execute("""SELECT echomq_append_v1('b', '[{"data": 1}]')""")
        with connection.cursor() as cursor, transaction.atomic():
            cursor.execute("SET LOCAL lock_timeout = '2s'")
            results = retention.apply_retention("default")
        assert [result.stream for result in results] == ["a", "c"]
        stopped.execute("COMMIT")
    assert [result.stream for result in retention.apply_retention("default")] == ["b"]
    assert Stream("b").info().count == 4


class TestDeletedMeanwhile:
    @pytest.mark.parametrize("again", [False, True])
    def test_a_waiting_reader_ends_with_an_error(self, again: bool) -> None:
        stream = filled(2)
        waits = threading.Event()

        def follow() -> type[Exception]:
            try:
                for record in stream.tail():
                    if record.position == 1:
                        waits.set()
            except (UnknownStream, CursorInvalid) as error:
                return type(error)
            raise AssertionError("tail ended without an error")

        with in_thread(follow) as following:
            assert waits.wait(30)
            stream.delete()
            if again:
                filled(5)
            assert following.result(30) in (UnknownStream, CursorInvalid)

    async def test_an_async_one_too(self) -> None:
        stream = Stream("orders")
        await stream.aappend({"n": 0})
        waits = asyncio.Event()

        async def follow() -> None:
            async for _ in stream.atail():
                waits.set()

        task = asyncio.ensure_future(follow())
        await asyncio.wait_for(waits.wait(), 30)
        await stream.adelete()
        with pytest.raises(UnknownStream):
            await asyncio.wait_for(task, 30)


@pytest.mark.postgres
class TestTrimUnderAHeldSnapshot:
    """Dead index entries can't be cleaned away: whoever looks from the front wades through."""

    @pytest.fixture
    def trimmed(self) -> Iterator[Stream]:
        stream = filled(20_000)
        with session() as holder:
            holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT count(*) FROM echomq_record")
            stream.trim(max_records=10)
            yield stream
            holder.execute("SELECT count(*) FROM echomq_record")

    def test_appends_and_reads_look_at_the_end_only(self, trimmed: Stream) -> None:
        assert blocks("""SELECT * FROM echomq_append_v1('orders', '[{"data": 1}]')""") < 300
        page, seen = read_counting_blocks(trimmed)
        assert [record.position for record in page.records] == list(range(19_990, 20_002))
        assert seen < 100
        assert trimmed.append({}).position == 20_002

    def test_an_emptied_stream_has_its_head_at_once(self) -> None:
        """Nothing is left at the end to be found first: the bound alone ends the look-up."""
        append = "SELECT * FROM echomq_append_v1(%s, %s)"
        record = '[{"data": 1}]'
        stream = filled(20_000)
        blocks(append, ["other", record])  # what is loaded once has been loaded
        with session() as holder:
            holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT count(*) FROM echomq_record")
            stream.trim(max_records=0)
            page, seen = read_counting_blocks(stream)
            assert (page.cursor, page.records) == (20_000, []) and seen < 60
            assert blocks(append, ["orders", record], times=1) < 60
            assert stream.append({}).position == 20_001

    def test_the_holder_reads_on_in_its_own_time(self) -> None:
        stream = filled(10)
        with session() as holder:
            holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            assert holder.execute("SELECT count(*) FROM echomq_record").fetchone() == (10,)
            stream.trim(max_records=0)
            assert holder.execute("SELECT count(*) FROM echomq_record").fetchone() == (10,)
        assert not Record.objects.exists()
        assert stream.append({}).position == 10


def blocks(sql: str, parameters: list[Any] | None = None, *, times: int = 2) -> int:
    """Return how many pages of the database a statement looks at, the last time."""
    with connection.cursor() as cursor:
        for _ in range(times):  # the first also loads the catalogue
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", parameters)
            (plan,) = cursor.fetchone()
    plan = json.loads(plan) if isinstance(plan, str) else plan
    return int(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])


def read_counting_blocks(stream: Stream) -> tuple[Page, int]:
    statements: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        statements.append((sql, parameters))
        return execute(sql, parameters, many, context)

    with connection.execute_wrapper(note):
        page = stream.read()
    ((sql, parameters),) = statements
    return page, blocks(sql, parameters)
