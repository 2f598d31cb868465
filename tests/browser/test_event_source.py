"""A browser's own `EventSource`, whose server is killed and comes back."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
import pytest_asyncio
from django.contrib.auth.models import User
from django.test import Client
from playwright.async_api import Browser, BrowserContext, Page

from echomq_app.core.server_sent import event
from echomq_app.stream import Stream
from tests.servers import AsgiServer, private_asgi
from tests.wait import wait_until_async

pytestmark = [
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

FOLLOW = """url => {
    window.told = [];
    window.source = new EventSource(url);
    source.onmessage = event => told.push(JSON.parse(event.data).data);
    for (const name of ["cursor_expired", "ended"]) {
        source.addEventListener(name, event => told.push(JSON.parse(event.data)));
    }
    source.addEventListener("subscribed", event => { window.began = JSON.parse(event.data); });
}"""


@pytest.fixture(scope="module")
def server(chromium: Browser, transactional_db: None) -> Iterator[AsgiServer]:
    with private_asgi(env=os.environ) as running:
        yield running


@pytest.fixture(scope="module")
def session(transactional_db: None) -> str:
    """Give the session key of somebody who may read all."""
    client = Client()
    client.force_login(User.objects.create_superuser("watcher"))
    return client.cookies["sessionid"].value


@pytest_asyncio.fixture(loop_scope="module")
async def page(chromium: Browser, server: AsgiServer, session: str) -> Any:
    """Give a page of the project, under its strict policy, whose visitor is logged in."""
    context: BrowserContext = await chromium.new_context()
    await context.add_cookies([{"name": "sessionid", "value": session, "url": server.url}])
    page = await context.new_page()
    await page.goto(server.url)
    yield page
    await context.close()


async def append(stream: str, *data: Any, **options: Any) -> None:
    await Stream(stream).aappend_many([{"data": one, **options} for one in data])


async def told(page: Page, expected: list[Any]) -> None:
    """Wait until the page was told as much, and check that it was this."""
    await wait_until_async(
        lambda: page.evaluate("count => told.length >= count", len(expected)), 60, "it was told"
    )
    assert await page.evaluate("told") == expected


async def began(page: Page) -> dict[str, Any]:
    """Wait until the source is open, for the first time or again."""
    await wait_until_async(lambda: page.evaluate("!!window.began"), 60, "it has begun")
    found: dict[str, Any] = await page.evaluate("began")
    await page.evaluate("() => { delete window.began; }")
    return found


async def test_it_goes_on_where_it_was_when_the_server_is_back(
    page: Page, server: AsgiServer
) -> None:
    await append("orders", 1)
    await page.evaluate(FOLLOW, "/echomq/streams/orders/events?from=first")
    await began(page)
    await append("orders", 2, 3)
    await told(page, [1, 2, 3])
    server.kill()
    await append("orders", 4, 5)
    server.restart()
    assert (await began(page))["recovered"]
    await append("orders", 6)
    await told(page, [1, 2, 3, 4, 5, 6])


async def test_an_id_without_data_is_taken_note_of_without_a_word(chromium: Browser) -> None:
    """What says that a filter has skipped records: else a page resumes far behind."""
    sent_back: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        kind, body = "text/html", b"<title>empty</title>"
        if head.startswith("GET /events"):
            kind, body = "text/event-stream", event(b'{"data": 1}', id="a", retry=10)
            body += event(id="b")
            found = re.search(r"(?i)^last-event-id: (.*?)\r$", head, re.MULTILINE)
            sent_back.append(found[1] if found else "")
        lines = [
            "HTTP/1.1 200 OK",
            f"Content-Type: {kind}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as plain:
        page = await chromium.new_page()
        await page.goto(f"http://127.0.0.1:{plain.sockets[0].getsockname()[1]}/")
        await page.evaluate(FOLLOW, "/events")
        await wait_until_async(lambda: len(sent_back) >= 2, 60, "it has connected again")
        assert sent_back[:2] == ["", "b"]
        assert set(await page.evaluate("told")) == {1}
        await page.close()
