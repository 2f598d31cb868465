"""What would stall the hub, or end it for all, or make it grow: each a moment that seldom comes."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import msgspec
import pytest
from django.db import OperationalError

from echomq_app.core.records import StreamRecord
from echomq_app.exceptions import InvalidName, InvalidPayload
from echomq_app.live import life as lives
from echomq_app.live import pages
from echomq_app.live.hub import Batch, Expired, hub_of_this_loop
from echomq_app.live.threads import DatabaseThreads
from echomq_app.models import paging
from echomq_app.stream import Stream
from tests.databases import database_alias
from tests.wait import wait_until_async

pytestmark = pytest.mark.django_db(transaction=True)


async def fill(name: str, number: int) -> None:
    await Stream(name).aappend_many([{"data": {"n": n}} for n in range(number)])


def test_work_that_comes_as_the_last_thread_ends_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echomq_app.live.threads.IDLE", 0.01)
    threads = DatabaseThreads()
    came, done = threading.Event(), threading.Event()

    class Lock:
        """Lets work come in right after a thread has decided to end."""

        def __init__(self) -> None:
            self.real = threading.Condition()

        def __enter__(self) -> None:
            self.real.acquire()

        def __exit__(self, *error: object) -> None:
            ends = threads._threads == 0
            self.real.release()
            if ends and not came.is_set():
                came.set()
                threads._submit(lambda *held: done.set())

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    threads._changed = Lock()  # type: ignore[assignment]
    threads._submit(lambda *held: None)
    assert came.wait(30)
    assert done.wait(10)


@pytest.mark.parametrize("place", [4, "token"])
async def test_ahead_by_a_single_record(place: Any) -> None:
    """A backup that lacks just the last one."""
    await fill("orders", 3)
    if place == "token":
        place = f"{(await Stream('orders').ainfo()).epoch}:4:00000000"
    reader = await hub_of_this_loop().open("orders", place, wake=bool)
    notice = reader.take(10, 1_000)
    assert isinstance(notice, Expired) and (notice.reason, notice.requested) == ("ahead", 4)
    assert not reader.opened.recovered
    reader.close()


async def test_a_token_that_is_newer_than_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a burst the tail is some pages behind: what it has not read yet is not ahead."""
    monkeypatch.setattr("echomq_app.live.stream_pages.PAGE_SIZES", (4, 4))
    hub = hub_of_this_loop()
    follows = await hub.open("orders", wake=bool)
    await fill("orders", 50)
    token = (await Stream("orders").ainfo()).token
    reader = await hub.open("orders", token, wake=bool)
    assert reader.opened.recovered and reader.opened.cursor == reader.opened.head == 50
    assert reader.take(10, 1_000) is None
    reader.close()
    follows.close()


def test_a_project_without_autocommit() -> None:
    """What the hub writes, it commits: nobody else would, and its locks would stay."""

    async def follow(alias: str) -> None:
        reader = await hub_of_this_loop().open("orders", wake=bool, using=alias)
        await fill("orders", 1)  # over another connection
        reader.close()

    with database_alias("manual", AUTOCOMMIT=False) as alias:
        asyncio.run(asyncio.wait_for(follow(alias), 30))
    assert Stream("orders").info().write_cursor == 1


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"key": "\0"}, InvalidPayload),
        ({"key": "\ud800"}, InvalidPayload),
        ({"types": ["\0"]}, InvalidPayload),
        ({"types": ["x" * 101]}, InvalidName),
    ],
)
async def test_a_filter_that_no_database_takes(more: Any, error: Any) -> None:
    """It must not reach the database, which would be asked again and again, or all be ended."""
    with pytest.raises(error):
        await hub_of_this_loop().open("orders", "first", wake=bool, **more)


async def test_a_life_that_is_over_is_not_kept_by_a_page_that_comes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fill("orders", 300)
    hub = hub_of_this_loop()
    go, read = threading.Event(), paging.read_stored_page
    woken = asyncio.Event()
    reader = await hub.open("orders", 0, wake=woken.set)

    def late(*args: Any, **options: Any) -> Any:
        assert go.wait(30)
        return read(*args, **options)

    monkeypatch.setattr(paging, "read_stored_page", late)
    assert reader.take(10, 1_000) is None
    reader.close()
    await wait_until_async(reader._tail._task.done)
    go.set()
    await wait_until_async(lambda: not hub._pages._coming)
    assert not hub._pages._kept


async def test_pages_are_not_read_for_ever_for_a_stream_that_nobody_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await fill("orders", 300)
    monkeypatch.setattr("echomq_app.live.stream_pages.full_jitter", lambda *args, **more: 0.01)
    hub = hub_of_this_loop()
    reader = await hub.open("orders", 0, wake=bool)

    def failing(*args: Any, **options: Any) -> Any:
        raise OperationalError("away")

    monkeypatch.setattr(paging, "read_stored_page", failing)
    assert reader.take(10, 1_000) is None
    reader.close()
    await wait_until_async(lambda: not hub._pages._coming)


async def test_a_reader_that_waits_for_a_page_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others on its socket have news meanwhile, and it is asked each time."""
    await fill("orders", 300)
    go, read = threading.Event(), paging.read_stored_page
    woken = asyncio.Event()
    hub = hub_of_this_loop()
    reader = await hub.open("orders", 0, wake=woken.set)

    def late(*args: Any, **options: Any) -> Any:
        assert go.wait(30)
        return read(*args, **options)

    monkeypatch.setattr(paging, "read_stored_page", late)
    for _ in range(100):
        assert reader.take(10, 1_000) is None
    (task,) = hub._pages._coming.values()
    assert len(task._callbacks) < 10
    go.set()
    await wait_until_async(lambda: isinstance(reader.take(10, 1_000), Batch))
    reader.close()


async def test_what_is_new_is_read_before_what_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters that match nothing keep the threads busy; who follows live must not wait for them."""
    await fill("orders", 5)
    hub = hub_of_this_loop()
    read, order, busy = paging.read_stored_page, [], threading.Event()

    def noting(*args: Any, **options: Any) -> Any:
        order.append("page" if options["types"] else "live")
        busy.wait(30)
        return read(*args, **options)

    woken = asyncio.Event()
    reader = await hub.open("orders", wake=woken.set)
    old = [await hub.open("orders", 0, wake=bool, types=[f"t{n}"]) for n in range(20)]
    monkeypatch.setattr(paging, "read_stored_page", noting)
    for one in old:
        assert one.take(10, 1_000) is None
    await wait_until_async(lambda: len(order) == 2)
    await fill("orders", 1)
    tail = next(iter(hub._tails.values()))
    tail.poke()
    # Until the tail's read waits its turn, behind eighteen others.
    await wait_until_async(lambda: hub._threads.waiting == 19 or "live" in order)
    busy.set()
    await asyncio.wait_for(woken.wait(), 10)
    assert order.index("live") <= 3, order
    for one in (reader, *old):
        one.close()


@dataclasses.dataclass(frozen=True)
class Hiding:
    key = "public"

    def __call__(self, record: StreamRecord) -> StreamRecord | None:
        return None


@dataclasses.dataclass(frozen=True)
class Showing:
    key = "public"

    def __call__(self, record: StreamRecord) -> StreamRecord | None:
        return record


async def test_two_kinds_of_masks_with_one_key_are_two() -> None:
    """As of two consumers on one stream: what one shows must not reach the other's users."""
    await fill("orders", 3)
    woken = asyncio.Event()
    showing = await hub_of_this_loop().open("orders", 0, wake=woken.set, mask=Showing())
    hiding = await hub_of_this_loop().open("orders", 0, wake=bool, mask=Hiding())
    while not isinstance(batch := showing.take(10, 10_000), Batch):
        await asyncio.wait_for(woken.wait(), 10)
        woken.clear()
    assert len(batch.records) == 3
    assert hiding.take(10, 10_000) is None
    showing.close()
    hiding.close()


class TestKept:
    """What is kept is bounded by what it really holds."""

    async def test_pages_without_records(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Filters that match nothing, again and again: each page holds its filter."""
        monkeypatch.setattr(pages, "KEPT_BYTES", 200_000)
        await fill("orders", 300)
        hub = hub_of_this_loop()
        for n in range(60):
            woken = asyncio.Event()
            types = [f"{n}.{'x' * 90}.{m}" for m in range(100)]
            reader = await hub.open("orders", 0, wake=woken.set, types=types)
            assert reader.take(10, 10_000) is None
            await asyncio.wait_for(woken.wait(), 30)
            reader.close()
        kept = hub._pages._kept
        held = sum(len(word) for name in kept for word in name.only.types or ())
        assert 0 < held <= hub._pages._kept_bytes <= 200_000
        monkeypatch.setattr(pages, "KEPT_PAGES", 3)
        reader = await hub.open("orders", 0, wake=bool, types=["z"])
        assert reader.take(10, 10_000) is None
        await wait_until_async(lambda: len(kept) <= 3)
        reader.close()

    async def test_pages_with_records_as_masks_show_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pages, "KEPT_BYTES", 100_000)
        hub = hub_of_this_loop()
        await Stream("orders").aappend_many([{"data": "x" * 100} for _ in range(300)])
        await self._read_with_masks("orders", 0, 300)
        kept = hub._pages._kept.values()
        held = sum(_held(item) for page in kept for item in page.items)
        assert 0 < held <= hub._pages._kept_bytes == sum(page.size for page in kept)
        assert hub._pages._kept_bytes <= max(100_000, *(page.size for page in kept))

    async def test_the_ring_with_records_as_masks_show_them(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lives, "RING_BYTES", 100_000)
        follows = await hub_of_this_loop().open("orders", wake=bool)
        await Stream("orders").aappend_many([{"data": "x" * 1_000} for _ in range(50)])
        tail = follows._tail
        await wait_until_async(lambda: tail.life is not None and tail.life.head == 50)
        its = tail.life
        assert its is not None
        await self._read_with_masks("orders", 0, 50)
        ring = its.ring.slice(its.ring.first)
        held = sum(_held(item) for item in ring)
        assert 0 < held <= its.ring_bytes == sum(item.size for item in ring)
        assert its.ring_bytes <= 100_000
        follows.close()

    async def test_a_reader_that_has_caught_up_holds_no_page(self) -> None:
        await fill("orders", 10)
        woken = asyncio.Event()
        reader = await hub_of_this_loop().open("orders", 0, wake=woken.set, key="")
        while not isinstance(reader.take(100, 100_000), Batch):
            await asyncio.wait_for(woken.wait(), 30)
            woken.clear()
        assert reader.take(100, 100_000) is None
        assert reader._page is None
        reader.close()

    @staticmethod
    async def _read_with_masks(name: str, place: int, end: int) -> None:
        for n in range(16):
            woken = asyncio.Event()
            reader = await hub_of_this_loop().open(name, place, wake=woken.set, mask=Padded(n))
            cursor = 0
            while cursor < end:
                woken.clear()
                taken = reader.take(50, 1_000_000)
                if isinstance(taken, Batch):
                    cursor = taken.cursor
                else:
                    await asyncio.wait_for(woken.wait(), 30)
            reader.close()


@dataclasses.dataclass(frozen=True)
class Padded:
    key: int

    def __call__(self, record: StreamRecord) -> StreamRecord | None:
        return msgspec.structs.replace(record, data=[self.key, record.data])


def _held(item: Any) -> int:
    return len(item.raw) + sum(len(raw) for raw in (item.masked or {}).values())
