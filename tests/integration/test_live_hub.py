"""The hub shares: what a thousand readers cost the database, and what slow ones cost at all."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, connections
from pytest_django.fixtures import Settings

from echomq_app.live import life as lives
from echomq_app.live.consumers import EchoConsumer
from echomq_app.live.hub import Batch, Expired, Reader, hub_of_this_loop
from echomq_app.live.threads import DatabaseThreads
from echomq_app.models import paging
from echomq_app.stream import Stream
from tests.live_client import LiveSocket
from tests.wait import wait_until, wait_until_async

pytestmark = pytest.mark.django_db(transaction=True)


class Page:
    """A reader that keeps what it took."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.positions: list[int] = []
        self.notices: list[Expired] = []
        self.reader: Reader

    async def open(self, name: str, place: Any = None, **more: Any) -> Page:
        self.reader = await hub_of_this_loop().open(name, place, wake=self.news.set, **more)
        self.cursor = self.reader.opened.cursor
        return self

    async def read_to(self, cursor: int) -> None:
        async with asyncio.timeout(30):
            while self.cursor < cursor:
                self.news.clear()
                taken = self.reader.take(500, 256_000)
                if taken is None:
                    await self.news.wait()
                    continue
                if isinstance(taken, Batch):
                    first = self.cursor
                    self.positions += range(first, first + len(taken.records))
                    assert taken.cursor == first + len(taken.records)
                else:
                    self.notices.append(taken)
                self.cursor = taken.cursor


async def fill(name: str, number: int) -> None:
    await Stream(name).aappend_many([{"data": {"n": n}} for n in range(number)])


@pytest.mark.parametrize("spread", [0, 100])
async def test_a_thousand_that_come_back_at_once(
    statements: list[str], monkeypatch: pytest.MonkeyPatch, spread: int
) -> None:
    # No poll in between: only what the readers cause is counted.
    monkeypatch.setattr("echomq_app.live.tail.PACE", 3600)
    await fill("orders", 1_000)
    kept = [record async for record in Stream("orders").areplay(899 - spread)]
    tokens = [record.token for record in kept if record.cursor <= 900]
    statements.clear()
    choose = random.Random(1)
    pages = [Page() for _ in range(1_000)]
    await asyncio.gather(*(page.open("orders", choose.choice(tokens)) for page in pages))
    await asyncio.gather(*(page.read_to(1_000) for page in pages))
    for page in pages:
        assert page.positions == list(range(1_000))[-len(page.positions) :]
        assert len(page.positions) >= 100 and not page.notices
        page.reader.close()
    assert len(statements) <= 5, statements


async def test_a_thousand_sockets_that_come_back_at_once(
    statements: list[str], settings: Settings
) -> None:
    settings.ECHOMQ = {"AUTHORIZE": _everybody, "POLL_INTERVAL": 3600.0}
    await fill("orders", 1_000)
    kept = [record async for record in Stream("orders").areplay(899)]
    statements.clear()
    sockets = [LiveSocket(EchoConsumer.as_asgi()) for _ in range(1_000)]
    await asyncio.gather(*(socket.open() for socket in sockets))
    await asyncio.gather(*(socket.subscribe("orders", resume=kept[0].token) for socket in sockets))
    for records in await asyncio.gather(*(socket.records(100) for socket in sockets)):
        assert [record["position"] for record in records] == list(range(900, 1_000))
    await asyncio.gather(*(socket.close() for socket in sockets))
    assert len(statements) <= 5, statements


async def _everybody(user: Any, action: str, target: str) -> bool:
    return True


async def test_a_token_newer_than_what_the_hub_has_seen_is_no_token_ahead(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ECHOMQ = {"POLL_INTERVAL": 3600.0}
    page = await Page().open("orders")
    monkeypatch.setattr("echomq_app.engine.notify", lambda group: None)  # nobody tells the hub
    receipt = await Stream("orders").aappend({"n": 0})
    other = await Page().open("orders", receipt.token)
    assert other.reader.opened.recovered
    await page.read_to(1)
    page.reader.close()
    other.reader.close()


async def test_readers_that_never_read_hold_a_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "RING_RECORDS", 100)
    await fill("orders", 1)
    stuck = await Page().open("orders")
    quick = await Page().open("orders")
    for round in range(20):
        await fill("orders", 50)
        await quick.read_to(1 + 50 * (round + 1))
    assert quick.positions == list(range(1, 1_001))
    life = quick.reader._life
    assert len(life.ring) == 100
    await stuck.read_to(1_001)
    assert stuck.positions == quick.positions, "from the database, where the ring has let go"
    stuck.reader.close()
    quick.reader.close()


async def test_the_ring_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lives, "RING_BYTES", 100_000)
    page = await Page().open("orders")
    await Stream("orders").aappend_many([{"data": "x" * 10_000} for _ in range(50)])
    await page.read_to(50)
    its = page.reader._life
    assert its.ring_bytes <= 100_000
    assert its.ring_bytes == sum(item.size for item in its.ring.slice(its.ring.first))
    page.reader.close()


async def test_the_second_joins_with_an_older_cursor_while_the_first_waits() -> None:
    await fill("orders", 150)
    first = await Page().open("orders")
    second = await Page().open("orders", 20)
    await fill("orders", 10)
    await asyncio.gather(first.read_to(160), second.read_to(160))
    assert first.positions == list(range(150, 160))
    assert second.positions == list(range(20, 160))
    first.reader.close()
    second.reader.close()


async def test_a_database_that_is_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    await fill("orders", 300)
    away = True
    read = paging.read_stored_page

    def failing(*args: Any, **options: Any) -> Any:
        if away:
            raise OperationalError("the server closed the connection")
        return read(*args, **options)

    live = await Page().open("orders")
    monkeypatch.setattr(paging, "read_stored_page", failing)
    for module in ("tail", "stream_pages"):
        jitter = f"echomq_app.live.{module}.full_jitter"
        monkeypatch.setattr(jitter, lambda *args, **more: 0.01)
    await fill("orders", 10)
    opening = asyncio.ensure_future(Page().open("orders", 5))
    await asyncio.sleep(0.1)
    assert not opening.done() and live.reader.take(500, 10_000) is None
    away = False
    late = await asyncio.wait_for(opening, 10)
    await asyncio.gather(live.read_to(310), late.read_to(310))
    assert live.positions == list(range(300, 310))
    assert late.positions == list(range(5, 310))
    live.reader.close()
    late.reader.close()


async def test_what_waits_in_the_outbox_is_moved_by_the_hub() -> None:
    page = await Page().open("orders")
    with_isolation = threading.Thread(target=_append_on_commit_serializable)
    with_isolation.start()
    await page.read_to(1)
    with_isolation.join()
    assert page.positions == [0]
    page.reader.close()


def _append_on_commit_serializable() -> None:
    from django.db import transaction

    try:
        with transaction.atomic():
            with connections["default"].cursor() as cursor:
                if connections["default"].vendor == "postgresql":
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
            Stream("orders").append_on_commit({"n": 0})
    finally:
        connections.close_all()


async def test_nothing_is_left_when_the_last_reader_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echomq_app.live.threads.IDLE", 0.05)
    page = await Page().open("orders")
    page.reader.close()
    await wait_until_async(lambda: _hub_tasks() == [])
    await wait_until_async(
        lambda: not [t for t in threading.enumerate() if t.name == "echomq-live"]
    )


def _hub_tasks() -> list[Any]:
    here = asyncio.current_task()
    return [task for task in asyncio.all_tasks() if task is not here]


class TestThreads:
    def test_each_job_runs_once_and_threads_come_and_go(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("echomq_app.live.threads.IDLE", 0.001)
        threads = DatabaseThreads()

        async def many() -> None:
            for _ in range(200):
                results = await asyncio.gather(
                    *(threads.run("default", lambda n=n: n) for n in range(3))  # type: ignore[misc]
                )
                assert results == [0, 1, 2]

        asyncio.run(many())
        wait_until(lambda: threads._threads == 0)
        assert threads._idle == 0

    def test_an_error_reaches_who_asked_and_the_connection_is_dropped(self) -> None:
        threads = DatabaseThreads()
        used: list[Any] = []

        def fail() -> None:
            connections["default"].ensure_connection()
            used.append(connections["default"])
            raise OperationalError("gone")

        async def ask() -> None:
            with pytest.raises(OperationalError, match="gone"):
                await threads.run("default", fail)
            assert used[0].connection is None
            assert await threads.run("default", lambda: 7) == 7

        asyncio.run(ask())


@pytest.fixture(autouse=True)
def _no_thread_outlives_its_test() -> Iterator[None]:
    yield
    # They hold connections to the test's database, and are daemons.
    assert all(t.daemon for t in threading.enumerate() if t.name == "echomq-live")


async def test_a_record_is_encoded_once_whoever_reads_it() -> None:
    """From the ring and from a page: all readers are handed the same bytes."""
    await fill("orders", 300)
    old = [await Page().open("orders", 0) for _ in range(3)]
    live = [await Page().open("orders") for _ in range(3)]
    await fill("orders", 1)
    taken: dict[int, set[int]] = {0: set(), 300: set()}
    for page in (*old, *live):
        first = page.cursor
        while not isinstance(batch := page.reader.take(1, 256_000), Batch):
            page.news.clear()
            await asyncio.wait_for(page.news.wait(), 30)
        taken[first].add(id(batch.records[0]))
    assert {first: len(ids) for first, ids in taken.items()} == {0: 1, 300: 1}
    for page in (*old, *live):
        page.reader.close()


async def test_kept_pages_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echomq_app.live.pages.KEPT_BYTES", 300_000)
    await Stream("orders").aappend_many([{"data": "x" * 1_000} for _ in range(2_000)])
    page = await Page().open("orders", 0)
    await page.read_to(2_000)
    pages = hub_of_this_loop()._pages
    kept = sum(one.size for one in pages._kept.values())
    assert kept == pages._kept_bytes
    largest = max(one.size for one in pages._kept.values())
    assert 0 < kept <= max(300_000, largest)
    assert page.positions == list(range(2_000))
    page.reader.close()
