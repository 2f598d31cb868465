"""Many streams are followed at the price of few statements, and a missing one makes no row."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection
from pytest_django.fixtures import Settings

from echomq_app import engine
from echomq_app.core.tokens import TOKEN_BEFORE_STREAM
from echomq_app.live import heads
from echomq_app.live.consumers import EchoConsumer
from echomq_app.live.heads import Heads
from echomq_app.live.hub import Batch, Expired, Reader, hub_of_this_loop
from echomq_app.live.limits import Limits
from echomq_app.live.threads import DatabaseThreads
from echomq_app.models import Stream as StreamRow
from echomq_app.models import paging
from echomq_app.models.heads import read_heads
from echomq_app.stream import Stream
from project.asgi import application
from tests import jobtasks
from tests.asgi_request import AsgiRequest
from tests.databases import session
from tests.live_client import LiveSocket
from tests.wait import wait_until_async

pytestmark = pytest.mark.django_db(transaction=True)

MANY = 1_200
add: Any = jobtasks.add


@pytest.fixture(autouse=True)
def _everybody(settings: Settings) -> None:
    settings.ALLOWED_HOSTS = ["*"]
    settings.ROOT_URLCONF = "project.urls"
    use(settings)


def use(settings: Settings, **more: Any) -> None:
    settings.ECHOMQ = {"AUTHORIZE": _may, **more}


async def _may(user: Any, action: str, target: str) -> bool:
    return True


class Follows:
    """A reader, its news, and what it has taken."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.reader: Reader

    async def open(self, name: str, place: Any = None) -> Follows:
        self.reader = await hub_of_this_loop().open(name, place, wake=self.news.set)
        return self

    async def take(self) -> Batch | Expired:
        async with asyncio.timeout(30):
            while True:
                self.news.clear()
                taken = self.reader.take(500, 256_000)
                if taken is not None:
                    return taken
                await self.news.wait()


@pytest_asyncio.fixture
async def follow() -> AsyncIterator[Callable[..., Any]]:
    opened: list[Follows] = []

    async def open(name: str, place: Any = None) -> Follows:
        follows = await Follows().open(name, place)
        opened.append(follows)
        return follows

    yield open
    for follows in opened:
        follows.reader.close()


class TestMany:
    async def test_idle_streams_share_statements(
        self, settings: Settings, follow: Callable[..., Any], statements: list[str]
    ) -> None:
        """To open them, and to poll them: a statement for each 500, and no page."""
        use(settings, POLL_INTERVAL=3_600.0)
        names = [f"idle.{n:04}" for n in range(MANY)]
        rows = [StreamRow(name=name) for name in names]
        await sync_to_async(StreamRow.objects.bulk_create)(rows)
        statements.clear()
        await asyncio.gather(*(follow(name) for name in names))
        chunks = -(-MANY // heads.CHUNK)
        assert len(statements) <= chunks + 1, statements  # the first to ask may go alone
        (one,) = hub_of_this_loop()._heads.values()
        for _ in range(3):
            statements.clear()
            await one._ask_all()
            assert len(statements) == chunks, statements

    async def test_a_poll_finds_what_no_wake_up_told(
        self,
        settings: Settings,
        follow: Callable[..., Any],
        statements: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        use(settings, POLL_INTERVAL=0.05)
        await Stream("orders").aappend({"n": 0})
        busy, idle = await follow("orders"), await follow("idle")
        monkeypatch.setattr("echomq_app.engine.notify", lambda group: None)
        await Stream("orders").aappend({"n": 1})
        assert len((await busy.take()).records) == 1
        pages = [sql for sql in statements if "LIMIT %s" in sql]
        assert len(pages) == 1, "of the one that has something new"
        assert idle.reader.take(500, 256_000) is None

    @pytest.mark.parametrize("change", ["rotate", "recreate", "trim", "delete"])
    async def test_a_poll_finds_each_kind_of_change(
        self,
        settings: Settings,
        follow: Callable[..., Any],
        monkeypatch: pytest.MonkeyPatch,
        change: str,
    ) -> None:
        use(settings, POLL_INTERVAL=3_600.0)  # when all has happened, and not in between
        stream = Stream("orders")
        await stream.aappend_many([{"data": n} for n in range(3)])
        follows = await follow("orders")
        monkeypatch.setattr("echomq_app.engine.notify", lambda group: None)
        if change == "rotate":
            await stream.arotate_epoch()
        elif change == "trim":
            await stream.atrim(max_records=1)
            life = follows.reader._life
            follows.reader._tail._check()
            await wait_until_async(lambda: life.first == 2)
            return
        else:
            await stream.adelete()
            if change == "delete":
                follows.reader._tail._check()
                with pytest.raises(Exception, match="no stream 'orders'"):
                    await follows.take()
                return
            await stream.aappend_many([{"data": n} for n in range(3)])
        follows.reader._tail._check()
        notice = await follows.take()
        assert isinstance(notice, Expired) and notice.reason == "epoch"

    async def test_a_poll_that_fails_is_one_line_and_goes_on(
        self,
        settings: Settings,
        follow: Callable[..., Any],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        use(settings, POLL_INTERVAL=0.02)
        monkeypatch.setattr(heads, "full_jitter", lambda *args, **more: 0)
        for name in ("a", "b", "c"):
            await Stream(name).aappend(0)
        follows = [await follow(name) for name in ("a", "b", "c")]
        monkeypatch.setattr("echomq_app.engine.notify", lambda group: None)
        read, fails = read_heads, [True]

        def failing(*args: Any, **options: Any) -> Any:
            if fails:
                fails.pop()
                raise OperationalError("away")
            return read(*args, **options)

        monkeypatch.setattr(heads, "read_heads", failing)
        await wait_until_async(lambda: not fails)
        await Stream("b").aappend(1)
        assert len((await follows[1].take()).records) == 1
        assert caplog.text.count("event=poll_failed") == 1


class TestPause:
    """How long a poll waits."""

    def test_longer_with_a_link_and_by_what_it_costs(
        self, settings: Settings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(settings, POLL_INTERVAL=0.25)
        polls = Heads("default", DatabaseThreads())
        linked = [False]
        monkeypatch.setattr(engine, "link_is_good", lambda: linked[0])
        assert polls._pause() == 0.25
        polls._seconds = 0.1
        assert polls._pause() == pytest.approx(1.0)
        linked[0] = True
        assert polls._pause() == pytest.approx(5.0)
        polls._seconds = 0.0
        assert polls._pause() == 1.0

    def test_the_link_is_good_while_redis_answers(
        self, settings: Settings, make_redis: Callable[[], Any]
    ) -> None:
        from tests.wait import wait_until

        redis = make_redis()
        settings.CHANNEL_LAYERS = {
            "default": {
                "BACKEND": "channels_redis.core.RedisChannelLayer",
                "CONFIG": {"hosts": [{"address": redis.url, "socket_timeout": None}]},
            }
        }
        assert not engine.link_is_good()
        with engine.waiter("emq.s.orders"):
            wait_until(engine.link_is_good)
            redis.kill()
            wait_until(lambda: not engine.link_is_good())
        engine.stop()


class TestTurns:
    def test_what_is_not_urgent_waits_for_one_that_is(self) -> None:
        """News of thousands of streams must not keep a replay waiting."""
        threads = DatabaseThreads()
        order: list[str] = []
        gate, began = threading.Event(), threading.Semaphore(0)

        def hold(*held: Any) -> None:
            began.release()
            assert gate.wait(30)

        threads._submit(hold)
        threads._submit(hold)
        assert began.acquire(timeout=30) and began.acquire(timeout=30)
        for n in range(50):
            threads._submit(partial(_note, order, f"urgent {n}"), urgent=True)
        done = threading.Event()
        for n in range(3):
            threads._submit(partial(_note, order, f"replay {n}"))
        threads._submit(lambda *held: done.set())
        gate.set()
        assert done.wait(30)
        assert order.index("replay 2") <= 8, order

    async def test_a_replay_begins_while_hundreds_of_streams_have_news(
        self, settings: Settings, follow: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each urgent read is followed by another one, for ever: the replay comes all the same."""
        use(settings, POLL_INTERVAL=3_600.0)
        await Stream("orders").aappend_many([{"data": n} for n in range(300)])
        names = [f"busy.{n}" for n in range(40)]
        for name in names:
            await Stream(name).aappend(0)
            await follow(name)
        tails = [hub_of_this_loop()._tails[name, "default"] for name in names]
        read = paging.read_stored_page

        def never_done(using: str, name: str, *args: Any, **options: Any) -> Any:
            if name.startswith("busy"):
                loop.call_soon_threadsafe(tails[names.index(name)].poke)
            return read(using, name, *args, **options)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(paging, "read_stored_page", never_done)
        for tail in tails:
            tail.poke()
        replay = await follow("orders", 0)
        taken = await replay.take()
        assert isinstance(taken, Batch) and taken.records
        monkeypatch.setattr(paging, "read_stored_page", read)


class TestMissingStream:
    """Reading never creates."""

    @pytest.mark.parametrize("name", ["new", "emq.new", "new.dead"])
    async def test_a_socket_waits_for_it_from_its_first_record_on(self, name: str) -> None:
        page = LiveSocket(EchoConsumer.as_asgi())
        await page.open()
        subscribed = await page.subscribe(name)
        assert (subscribed["cursor"], subscribed["head"], subscribed["recovered"]) == (0, 0, True)
        assert subscribed["resume"] == str(TOKEN_BEFORE_STREAM)
        assert not await StreamRow.objects.aexists()
        if name == "new":
            await Stream(name).aappend_many([{"data": n} for n in range(3)])
            records = await page.records(3)
            assert [record["data"] for record in records] == [0, 1, 2]
            assert page.resume == (await Stream(name).ainfo()).token
        await page.close()

    async def test_server_sent_events(self) -> None:
        async with AsgiRequest(application, "/echomq/streams/new/events") as request:
            subscribed = await request.expect("subscribed")
            assert subscribed.id == str(TOKEN_BEFORE_STREAM)
            assert not await StreamRow.objects.aexists()
            await Stream("new").aappend_many([{"data": n} for n in range(2)])
            first, second = await request.records(2)
            page = await Stream("new").aread(first.id)
            assert [record.data for record in page.records] == [1]
            assert second.id == (await Stream("new").ainfo()).token

    @pytest.mark.parametrize("trimmed", [False, True])
    async def test_its_token_is_good_once_the_stream_exists(
        self, follow: Callable[..., Any], trimmed: bool
    ) -> None:
        stream = Stream("new")
        await stream.aappend_many([{"data": n} for n in range(3)])
        if trimmed:
            await stream.atrim(max_records=1)
        taken = await (await follow("new", str(TOKEN_BEFORE_STREAM))).take()
        if trimmed:
            assert isinstance(taken, Expired) and (taken.reason, taken.requested) == ("trimmed", 0)
        else:
            assert isinstance(taken, Batch) and (taken.since, len(taken.records)) == (0, 3)
        page_or_error = sync_to_async(stream.read)(str(TOKEN_BEFORE_STREAM))
        if trimmed:
            with pytest.raises(Exception, match="new"):
                await page_or_error
        else:
            assert len((await page_or_error).records) == 3

    async def test_trimmed_before_anybody_looked(
        self, settings: Settings, follow: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use(settings, POLL_INTERVAL=3_600.0)
        follows = await follow("new")
        monkeypatch.setattr("echomq_app.engine.notify", lambda group: None)
        await Stream("new").aappend_many([{"data": n} for n in range(3)])
        await Stream("new").atrim(max_records=1)
        hub_of_this_loop()._tails["new", "default"].poke()
        notice = await follows.take()
        assert isinstance(notice, Expired)
        assert (notice.reason, notice.requested, notice.head) == ("trimmed", 0, 3)

    async def test_a_socket_waits_for_few(self, settings: Settings) -> None:
        class Few(EchoConsumer):
            limits = Limits(missing_streams=2)

        page = LiveSocket(Few.as_asgi())
        await page.open()
        for sub in (1, 2):
            await page.subscribe(f"new.{sub}", sub=sub)
        await page.send({"type": "subscribe", "sub": 3, "stream": "new.3"})
        error = await page.expect("error", code="too_many", sub=3)
        assert "2 missing streams" in error["message"]
        await Stream("new.1").aappend(0)
        await page.records(1, sub=1)
        await page.subscribe("new.3", sub=3)
        assert set(await _names()) == {"new.1"}
        await page.close()

    async def test_what_waits_in_the_outbox_creates_it(
        self, settings: Settings, follow: Callable[..., Any]
    ) -> None:
        """Under SERIALIZABLE the first record of a stream waits for a relay."""
        if connection.vendor != "postgresql":
            pytest.skip("SQLite has no outbox")
        use(settings, POLL_INTERVAL=0.05)
        follows = await follow("new")
        await sync_to_async(_append_on_commit_serializable)()
        taken = await follows.take()
        assert isinstance(taken, Batch) and len(taken.records) == 1

    async def test_a_page_in_json_is_not_found(self) -> None:
        async with AsgiRequest(application, "/echomq/streams/new") as request:
            await request.ended()
            assert request.status == 404
        assert not await StreamRow.objects.aexists()


async def _names() -> list[str]:
    return [name async for name in StreamRow.objects.values_list("name", flat=True)]


def _note(order: list[str], what: str, *held: Any) -> None:
    order.append(what)


def _append_on_commit_serializable() -> None:
    from django.db import transaction

    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        Stream("new").append_on_commit({"n": 0})


@pytest.mark.postgres
async def test_who_asks_while_rows_wait_in_the_outbox_gets_an_answer(
    settings: Settings, follow: Callable[..., Any]
) -> None:
    """A job was enqueued in a new queue, and no worker has relayed its record."""
    use(settings, POLL_INTERVAL=0.05)
    await sync_to_async(add.enqueue)(1, 2)
    follows = await asyncio.wait_for(follow("emq.default", 0), 30)
    taken = await follows.take()
    assert isinstance(taken, Batch) and len(taken.records) == 1


@pytest.mark.postgres
async def test_who_asks_while_an_older_transaction_is_open_gets_an_answer(
    settings: Settings, follow: Callable[..., Any]
) -> None:
    """The relay moves nothing yet: the stream doesn't exist, and comes when it can."""
    use(settings, POLL_INTERVAL=0.05)
    with session() as other:
        other.execute("BEGIN")
        other.execute("SELECT pg_current_xact_id()")
        await sync_to_async(add.enqueue)(1, 2)
        follows = await asyncio.wait_for(follow("emq.default"), 30)
        other.execute("ROLLBACK")
    await sync_to_async(add.enqueue)(1, 2)
    assert isinstance(taken := await follows.take(), Batch) and taken.records


def test_a_thread_that_does_not_start_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = DatabaseThreads()
    start, refusals = threading.Thread.start, [True, True]

    def refused(self: threading.Thread) -> None:
        if self.name == "echomq-live" and refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)

    async def ask() -> int:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="new thread"):
                await threads.run("default", lambda: 1)
        return await asyncio.wait_for(threads.run("default", lambda: 2), 30)

    assert asyncio.run(ask()) == 2
