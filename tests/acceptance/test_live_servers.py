"""Live pages on real servers: memory, replicas, and a client that is cut off again and again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from echomq_app.stream import Stream
from tests.layers import ROOT
from tests.servers import AsgiServer, Redis
from tests.wait import wait_until_async

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.live_settings"}
Frame = dict[str, Any]


@contextlib.asynccontextmanager
async def socket(server: AsgiServer, **options: Any) -> AsyncIterator[ClientConnection]:
    async with connect(
        f"{server.ws_url}/ws/echomq/", compression=None, open_timeout=30, **options
    ) as connection:
        yield connection


async def frame(connection: ClientConnection) -> Frame:
    received: Frame = json.loads(await asyncio.wait_for(connection.recv(), 30))
    return received


async def subscribed(connection: ClientConnection, stream: str, **more: Any) -> Frame:
    subscribe = {"type": "subscribe", "sub": 1, "stream": stream, **more}
    await connection.send(json.dumps(subscribe))
    assert (await frame(connection))["type"] == "welcome"
    answer = await frame(connection)
    assert answer["type"] == "subscribed", answer
    return answer


async def read_to(connection: ClientConnection, cursor: int) -> list[Frame]:
    """Read and acknowledge up to a cursor; return the records."""
    records: list[Frame] = []
    at = -1
    while at < cursor:
        came = await frame(connection)
        assert came["type"] == "records", came
        records += came["records"]
        at = came["cursor"]
        await connection.send(json.dumps({"type": "ack", "sub": 1, "cursor": at}))
    return records


@pytest.mark.postgres  # nothing in it depends on the database, and it takes its time
class TestMemory:
    @pytest.mark.parametrize("server", ["uvicorn", "daphne"])
    async def test_flat_while_fifty_clients_never_read(
        self, make_asgi: Callable[..., AsgiServer], server: str
    ) -> None:
        """Fifty clients take nothing while 50,000 records more are appended; one takes all.

        Under daphne, which accepts whatever it is given to send, the protocol's window is
        all that bounds it.
        """
        site = make_asgi(server=server, env=SETTINGS)
        process = psutil.Process(site.process.pid)
        async with contextlib.AsyncExitStack() as stack:
            reader = await stack.enter_async_context(socket(site))
            await subscribed(reader, "orders")
            for _ in range(50):
                # Takes one message from the network and then no more, until somebody reads it.
                stuck = await stack.enter_async_context(socket(site, max_queue=1))
                subscribe = {"type": "subscribe", "sub": 1, "stream": "orders", "from": "first"}
                await stuck.send(json.dumps(subscribe))
            sizes = []
            for done in range(0, 70_000, 10_000):
                for _ in range(10):
                    await Stream("orders").aappend_many(
                        [{"data": {"n": n, "text": "x" * 300}} for n in range(1_000)]
                    )
                assert len(await read_to(reader, done + 10_000)) == 10_000
                sizes.append(process.memory_info().rss)
        # The first 20,000 fill the ring, the pages, the windows, and Python's own free lists.
        assert sizes[-1] <= sizes[1] * 1.1, [f"{size / 1e6:.1f} MB" for size in sizes]


class TestReplicas:
    @pytest.fixture
    def own_redis(self, make_redis: Callable[..., Redis]) -> Redis:
        return make_redis(tcp=True)

    async def test_a_record_reaches_pages_on_both_at_once(
        self, make_asgi: Callable[..., AsgiServer], own_redis: Redis
    ) -> None:
        # They look by themselves once a minute: what comes sooner comes by the wake-up.
        env = {**SETTINGS, "ECHOMQ_REDIS_URL": own_redis.url, "ECHOMQ_TEST_POLL": "60"}
        first, second = make_asgi(env=env), make_asgi(env=env)
        async with socket(first) as one, socket(second) as other:
            await subscribed(one, "orders")
            await subscribed(other, "orders")
            appended = _append_in_another_process(env, "orders", 3)
            for page in (one, other):
                assert len(await read_to(page, 3)) == 3
            assert appended.wait(30) == 0

    async def test_without_redis_it_still_does(
        self, make_asgi: Callable[..., AsgiServer], own_redis: Redis
    ) -> None:
        env = {**SETTINGS, "ECHOMQ_REDIS_URL": own_redis.url}
        first, second = make_asgi(env=env), make_asgi(env=env)
        async with socket(first) as one, socket(second) as other:
            await subscribed(one, "orders")
            await subscribed(other, "orders")
            own_redis.stop()
            appended = _append_in_another_process(env, "orders", 3)
            for page in (one, other):
                assert len(await read_to(page, 3)) == 3
            assert appended.wait(60) == 0


def _append_in_another_process(
    env: dict[str, str], stream: str, number: int
) -> subprocess.Popen[bytes]:
    code = (
        "import django; django.setup()\n"
        "from echomq_app.stream import Stream\n"
        f"for n in range({number}): Stream({stream!r}).append({{'n': n}})\n"
    )
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **env}, cwd=ROOT)


class History:
    """What one client was told, over all its connections."""

    def __init__(self) -> None:
        self.records: list[Frame] = []
        self.resume = ""
        self.cursor = 0
        self.expired: list[Frame] = []
        self.connections = 0

    def take(self, came: Frame) -> None:
        """Check a frame against all that came before."""
        if came["type"] == "records":
            positions = [record["position"] for record in came["records"]]
            assert positions == list(range(self.cursor, came["cursor"])), (self.cursor, positions)
            self.records += came["records"]
        elif came["type"] == "cursor_expired":
            assert came["reason"] == "trimmed" and came["cursor"] > self.cursor
            assert came["requested"] == self.cursor
            self.expired.append(came)
        elif came["type"] == "subscribed":
            if not came["recovered"]:
                assert "resume" not in came  # until it has been told, the old token counts
                return
            if self.resume:
                assert came["cursor"] == self.cursor
        else:
            assert came["type"] == "welcome", came
            return
        self.cursor, self.resume = came["cursor"], came["resume"]


async def follow(server: AsgiServer, history: History, end: int, rng: random.Random) -> None:
    """Follow the stream to its end, on connections that last for a random number of frames."""
    while history.cursor < end:
        with contextlib.suppress(OSError, ConnectionClosed, InvalidHandshake, TimeoutError):
            async with socket(server) as connection:
                history.connections += 1
                place = {"resume": history.resume} if history.resume else {"from": "first"}
                subscribe = {"type": "subscribe", "sub": 1, "stream": "orders", **place}
                await connection.send(json.dumps(subscribe))
                for _ in range(rng.randint(2, 40)):
                    came = await frame(connection)
                    history.take(came)
                    if came["type"] == "records":
                        ack = {"type": "ack", "sub": 1, "cursor": came["cursor"]}
                        await connection.send(json.dumps(ack))
                    if history.cursor >= end:
                        return
                connection.transport.abort()
        await asyncio.sleep(rng.random() * 0.1)


@contextlib.contextmanager
def appenders(seed: int, folder: Path, each: int) -> Iterator[None]:
    """Run two processes that append so many records each, some at a time."""
    limit = folder / "limit"
    limit.write_text(str(each))
    command = [sys.executable, "-m", "tests.browser.live_appender", "orders"]
    with contextlib.ExitStack() as stack:
        for number, writer in enumerate("ab"):
            process = stack.enter_context(
                subprocess.Popen([*command, writer, str(seed + number), str(limit)], cwd=ROOT)
            )
            stack.callback(process.terminate)
        yield


@pytest.mark.parametrize("seed", [1, 2])
async def test_cut_off_again_and_again(
    make_asgi: Callable[..., AsgiServer], tmp_path: Path, seed: int
) -> None:
    """Two clients, a server that is killed, two processes that append 10,000 records.

    Each client ends with every record once and in order.
    """
    rng = random.Random(seed)
    site = make_asgi(env=SETTINGS)
    histories = [History(), History()]
    with appenders(seed, tmp_path, 5_000):
        following = [
            asyncio.ensure_future(follow(site, history, 10_000, random.Random(rng.random())))
            for history in histories
        ]
        for _ in range(2):
            came, _ = histories[0].cursor, None
            more = came + rng.randint(1_000, 3_000)
            await wait_until_async(lambda m=more: histories[0].cursor >= m, timeout=120)  # type: ignore[misc]
            site.kill()
            await asyncio.to_thread(site.restart)
        await asyncio.wait_for(asyncio.gather(*following), 200)
    for history in histories:
        assert [record["position"] for record in history.records] == list(range(10_000))
        for writer in "ab":
            own = [r["data"]["n"] for r in history.records if r["data"]["writer"] == writer]
            assert own == list(range(5_000))
        assert history.connections > 3 and not history.expired


async def test_cut_off_while_retention_overtakes(
    make_asgi: Callable[..., AsgiServer], tmp_path: Path
) -> None:
    """The same, while the stream keeps only its newest records: told, and then every later one."""
    site = make_asgi(env=SETTINGS)
    history = History()
    stream = Stream("orders")
    with appenders(3, tmp_path, 2_500):
        following = asyncio.ensure_future(follow(site, history, 5_000, random.Random(3)))
        while not following.done():
            with contextlib.suppress(Exception):
                await stream.atrim(max_records=20)
            await asyncio.wait([following], timeout=0.02)
        await following
        # And one that was away for long.
        gone = History()
        gone.resume, gone.cursor = f"{(await stream.ainfo()).epoch}:7:", 7
        await follow(site, gone, 5_000, random.Random(4))
    positions = [record["position"] for record in history.records]
    assert positions == sorted(set(positions))
    missed = sum(notice["cursor"] - notice["requested"] for notice in history.expired)
    assert len(positions) + missed == 5_000
    assert gone.expired[0]["requested"] == 7
