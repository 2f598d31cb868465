"""Server-sent events under real servers: clients of all kinds, many of them, and slow ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Permission, User
from django.contrib.sessions.backends.db import SessionStore
from django.db import connection
from django.test import Client
from httpx_sse import ServerSentEvent, aconnect_sse

from echomq_app.live.access import make_token
from echomq_app.stream import Stream
from tests.servers import AsgiServer, private_asgi
from tests.wait import wait_until_async

pytestmark = pytest.mark.django_db(transaction=True)

EVENTS = "/echomq/streams/orders/events"
TIMEOUT = 60.0

Site = Callable[[str], AsgiServer]
both = pytest.mark.parametrize("server", ["uvicorn", "daphne"])


@pytest.fixture(scope="module")
def site(django_db_setup: None) -> Iterator[Site]:
    """Give the project under each server, started once: it takes seconds."""
    env = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.integration.sse_settings"}
    running: dict[str, AsgiServer] = {}
    with contextlib.ExitStack() as stack:

        def start(server: str) -> AsgiServer:
            if server not in running:
                running[server] = stack.enter_context(private_asgi(server=server, env=env))
            return running[server]

        yield start


@pytest.fixture
def user() -> User:
    user = User.objects.create_user("ada", password="lovelace")
    user.user_permissions.add(Permission.objects.get(codename="view_record"))
    return user


@contextlib.asynccontextmanager
async def following(
    server: AsgiServer, headers: dict[str, str], **query: Any
) -> AsyncIterator[AsyncIterator[ServerSentEvent]]:
    """Give the events of `orders` as httpx-sse reads them, without the first, `subscribed`."""
    async with (
        httpx.AsyncClient(timeout=TIMEOUT) as client,
        aconnect_sse(client, "GET", server.url + EVENTS, headers=headers, params=query) as source,
    ):
        source.response.raise_for_status()
        events = source.aiter_sse()
        assert (await anext(events)).event == "subscribed"
        yield events


def bearer(user: User) -> dict[str, str]:
    return {"Authorization": f"Bearer {make_token(user)}"}


async def append(*data: Any) -> None:
    await Stream("orders").aappend_many([{"data": one} for one in data])


async def take(events: AsyncIterator[ServerSentEvent], number: int) -> list[Any]:
    """Return the data of so many records."""
    return [(await anext(events)).json()["data"] for _ in range(number)]


@both
async def test_httpx_sse_goes_on_where_it_was(site: Site, server: str, user: User) -> None:
    running = site(server)
    await append(1, 2)
    async with following(running, bearer(user), **{"from": "first"}) as events:
        assert await take(events, 2) == [1, 2]
        await append(3)
        last = await anext(events)
        assert last.json()["data"] == 3
    await append(4, 5, 6)
    async with following(running, {**bearer(user), "Last-Event-ID": last.id}) as events:
        assert await take(events, 3) == [4, 5, 6]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl on PATH")
@both
async def test_curl(site: Site, server: str, user: User) -> None:
    running = site(server)
    await append("first")
    curl = await asyncio.create_subprocess_exec(
        *(
            "curl",
            "--silent",
            "--no-buffer",
            "--header",
            f"Authorization: {bearer(user)['Authorization']}",
        ),
        f"{running.url}{EVENTS}?from=first",
        stdout=asyncio.subprocess.PIPE,
    )
    assert curl.stdout is not None
    try:
        for content in ("first", "second"):
            expected = f'"data":"{content}"'.encode()
            async with asyncio.timeout(TIMEOUT):
                while expected not in await curl.stdout.readline():
                    pass
            await append("second")
    finally:
        curl.terminate()
        await curl.wait()


@both
async def test_ends_when_the_session_does_and_no_secret_is_logged(
    site: Site, server: str, user: User
) -> None:
    running = site(server)

    def log_in() -> str:
        client = Client()
        client.force_login(user)
        return client.cookies["sessionid"].value

    key = await sync_to_async(log_in)()
    async with following(running, {"Cookie": f"sessionid={key}"}) as events:
        await append(1)
        assert await take(events, 1) == [1]
        await sync_to_async(SessionStore(key).delete)()  # as another process does
        ended = await asyncio.wait_for(anext(events), TIMEOUT)
        assert (ended.event, ended.json()["code"]) == ("ended", "unauthenticated")
        with pytest.raises(StopAsyncIteration):
            await anext(events)
    secrets = [key]
    async with httpx.AsyncClient(timeout=TIMEOUT) as client:
        address = running.url + EVENTS
        for status, token in ((200, make_token(user)), (401, make_token(user) + "x")):
            secrets.append(token)
            headers = {"Authorization": f"Bearer {token}"}
            async with client.stream("GET", address, headers=headers) as response:
                assert response.status_code == status
        foreign = {"Cookie": f"sessionid={key}", "Origin": "http://evil.example"}
        assert (await client.get(address, headers=foreign)).status_code == 403
    log = running.folder / f"{server}.log"
    await wait_until_async(lambda: log.read_text().count(EVENTS) >= 2, 10, "requests are logged")
    assert not [secret for secret in secrets if secret in log.read_text()]


# Many


class Raw:
    """A client as plain as can be: a socket, and what came."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(
        cls, server: AsgiServer, headers: dict[str, str], query: str = "", *, slow: bool = False
    ) -> Raw:
        sock = socket.socket()
        if slow:  # what the kernel takes in for it should not hide what the server does
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", server.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=8_192 if slow else 2**25)
        lines = [f"GET {EVENTS}{query} HTTP/1.1", f"Host: 127.0.0.1:{server.port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        client = cls(reader, writer)
        await client.until(b"event: subscribed")
        return client

    async def until(self, text: bytes) -> None:
        async with asyncio.timeout(TIMEOUT):
            await self.reader.readuntil(text)

    def close(self) -> None:
        self.writer.transport.abort()


def threads_of(server: AsgiServer) -> int:
    return psutil.Process(server.process.pid).num_threads()


def connections_of(server: AsgiServer) -> int:
    """Count the connections to the database of this process; on PostgreSQL, of all but ours."""
    if connection.vendor == "sqlite":
        path = Path(str(connection.settings_dict["NAME"])).resolve()
        opened = psutil.Process(server.process.pid).open_files()
        return len([file for file in opened if Path(file.path) == path])
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return int(cursor.fetchone()[0])


@both
async def test_200_streams_have_no_thread_and_no_connection_each(
    site: Site, server: str, user: User
) -> None:
    running = site(server)
    headers = bearer(user)
    clients = [await Raw.open(running, headers)]
    threads, connections = threads_of(running), await sync_to_async(connections_of)(running)
    try:
        for _ in range(10):
            clients += await asyncio.gather(*(Raw.open(running, headers) for _ in range(20)))
        assert len(clients) == 201
        await append("news")
        await asyncio.gather(*(client.until(b'"data":"news"') for client in clients))
        # The hub's two threads, and the one that asks about permissions.
        assert threads_of(running) <= threads + 2
        assert await sync_to_async(connections_of)(running) <= connections + 2
    finally:
        for client in clients:
            client.close()


@both
async def test_clients_that_do_not_read_cost_no_memory(site: Site, server: str, user: User) -> None:
    running = site(server)
    headers = bearer(user)
    number, step, text = 4_000, 1_000, "x" * 5_000
    process = psutil.Process(running.process.pid)
    fast = await Raw.open(running, headers)
    slow = [await Raw.open(running, headers, slow=True) for _ in range(10)]
    try:
        before = process.memory_info().rss
        for start in range(0, number, step):
            await append(*([text] * step))
            await fast.until(f'"position":{start + step - 1},'.encode())
        grown = process.memory_info().rss - before
        # All of it for each would be 200 MB. The hub's own memory is bounded by itself.
        assert grown < 80_000_000, f"{grown:,}"
        await fast_forward(slow[0], number)
    finally:
        for client in (fast, *slow):
            client.close()


async def fast_forward(client: Raw, number: int) -> None:
    """Read all that a client has missed: every record, in order."""
    position = 0
    async with asyncio.timeout(TIMEOUT):
        async for line in client.reader:
            if line.startswith(b'data: {"id"'):
                assert json.loads(line[6:])["position"] == position
                position += 1
            assert not line.startswith(b"event: cursor_expired")
            if position == number:
                return
