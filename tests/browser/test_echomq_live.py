"""Pages that follow a stream, in a real Chromium on a real server, cut off in every way."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio
from django.contrib.auth.models import User
from django.test import Client
from playwright.async_api import Browser, ConsoleMessage, Page, Route, expect

from echomq_app.stream import Stream
from project.children import Child
from tests.browser.conftest import CONNECTION_GONE, TIMEOUT
from tests.browser.rough_proxy import RoughProxy, rough_proxy
from tests.servers import AsgiServer, private_asgi
from tests.wait import wait_until_async

pytestmark = [
    pytest.mark.database,
    pytest.mark.asyncio(loop_scope="module"),
    # Seconds on an idle machine. On a busy one a browser is what suffers most.
    pytest.mark.timeout(300),
]

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("ECHOMQ_SEED", "1"))
WRITERS = ("ann", "bob")
EACH = 5_000
MISHAPS = 8
OFFLINE = "net::ERR_INTERNET_DISCONNECTED"
FOUND = "() => [window.journal ?? [], window.subscription?.resume]"

Open = Callable[..., Awaitable[Page]]
Prepare = Callable[[Page], Awaitable[object]]
Action = Callable[[], Awaitable[object]]


def environment() -> dict[str, str]:
    return {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.browser.live_settings"}


@pytest.fixture(scope="module")
def server(chromium: Browser, transactional_db: None) -> Iterator[AsgiServer]:
    with private_asgi(env=environment()) as running:
        yield running


@pytest.fixture(scope="module")
def reader(transactional_db: None) -> Client:
    """Give the session of somebody who may read all."""
    client = Client()
    client.force_login(User.objects.create_superuser("reader"))
    return client


@pytest_asyncio.fixture(loop_scope="module")
async def proxy(server: AsgiServer) -> AsyncIterator[RoughProxy]:
    async with rough_proxy(server.port) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def open_page(chromium: Browser, proxy: RoughProxy, reader: Client) -> AsyncIterator[Open]:
    """Give a function that opens a page through the proxy, logged in.

    Whatever its console says fails the test, but for what Chromium says about connections.
    """
    url = f"http://127.0.0.1:{proxy.port}"
    context = await chromium.new_context()
    context.set_default_timeout(TIMEOUT)
    session = reader.cookies["sessionid"].value
    await context.add_cookies([{"name": "sessionid", "value": session, "url": url}])
    problems: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if not CONNECTION_GONE.search(message.text) and OFFLINE not in message.text:
            problems.append(f"console {message.type}: {message.text} ({message.location})")

    async def open_at(
        kind: str, stream: str, options: str = "", prepare: Prepare | None = None
    ) -> Page:
        page = await context.new_page()
        if prepare is not None:
            await prepare(page)
        page.on("console", on_console)
        page.on("pageerror", lambda error: problems.append(f"exception: {error}"))
        response = await page.goto(f"{url}/live/{kind}/{stream}/?options={quote(options)}")
        assert response is not None and response.status == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        return page

    yield open_at
    await context.close()
    assert problems == []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Journal:
    """What a page was told, in order."""

    entries: list[list[Any]]
    resume: str | None

    def of(self, kind: str) -> list[list[Any]]:
        return [rest for what, *rest in self.entries if what == kind]

    @property
    def positions(self) -> list[int]:
        return [position for position, _ in self.of("record")]


async def journal_of(page: Page) -> Journal:
    entries, resume = await page.evaluate(FOUND)
    return Journal(entries=entries, resume=resume)


async def open_journal(
    open_page: Open,
    stream: str,
    prepare: Prepare | None = None,
    options: dict[str, Any] | None = None,
) -> Page:
    page = await open_page("journal", stream, json.dumps(options or {}), prepare)
    await expect(page.locator("body")).to_have_attribute("data-state", "open")
    return page


async def reached(page: Page, stream: str) -> Journal:
    """Wait until the page's handlers have dealt with all that there is."""
    token = (await Stream(stream).ainfo()).token
    # Polled from here: a page that has just thawed may have lost what it was to poll with.

    async def there() -> bool:
        return (await journal_of(page)).resume == token

    await wait_until_async(there, 120, "the page has reached the head", poll=0.1)
    return await journal_of(page)


class Mishaps:
    """What can happen to a page and its server, each undone when it returns."""

    def __init__(self, page: Page, proxy: RoughProxy, server: AsgiServer, seed: int) -> None:
        self._page, self._proxy, self._server = page, proxy, server
        self._rng = random.Random(seed)
        self._seen = 0
        self.happened: list[str] = []

    async def next(self) -> None:
        """Wait until records have come since the last one, and let something happen."""
        before = self._seen

        async def going() -> bool:
            self._seen = await self._page.evaluate("journal.length")
            return self._seen > before

        await wait_until_async(going, 60, "records come")
        await asyncio.sleep(self._rng.random() * 0.2)
        kinds: dict[str, Action] = {
            "reset": self._reset,
            "swallowed": self._swallowed,
            "refused": self._refused,
            "offline": self._offline,
            "hidden": self._hidden,
            "asleep": self._asleep,
        }
        name = self._rng.choice([*kinds, "reset", "reset"])
        self.happened.append(name)
        await kinds[name]()

    async def server_killed(self) -> None:
        self.happened.append("killed")
        self._server.kill()
        await self._state("waiting", "connecting")
        self._server.restart()

    async def _reset(self) -> None:
        self._proxy.cut()
        await asyncio.sleep(self._rng.random() * 0.3)

    async def _swallowed(self) -> None:
        """Half open: only the watchdog can tell."""
        passed = self._proxy.passed
        self._proxy.swallow()
        await wait_until_async(lambda: self._proxy.passed > passed, 60, "it connects again")

    async def _refused(self) -> None:
        self._proxy.refusing = True
        self._proxy.cut()
        await self._state("waiting", "connecting")
        await asyncio.sleep(self._rng.random())
        self._proxy.refusing = False

    async def _offline(self) -> None:
        await self._page.context.set_offline(True)
        self._proxy.cut()
        await self._state("waiting", "connecting")
        await asyncio.sleep(self._rng.random())
        await self._page.context.set_offline(False)

    async def _hidden(self) -> None:
        await self._page.evaluate("look('hidden')")
        await self._state("paused")
        await asyncio.sleep(self._rng.random() * 0.5)
        await self._page.evaluate("look('visible')")

    async def _asleep(self) -> None:
        """No timer and no handler runs, and on waking up the connection is gone."""
        session = await self._page.context.new_cdp_session(self._page)
        await session.send("Page.setWebLifecycleState", {"state": "frozen"})
        self._proxy.swallow()
        await asyncio.sleep(self._rng.random())
        await session.send("Page.setWebLifecycleState", {"state": "active"})
        await session.detach()

    async def _state(self, *states: str) -> None:
        """Wait for a state that doesn't end by itself."""

        async def there() -> bool:
            return await self._page.evaluate("document.body.dataset.state") in states

        await wait_until_async(there, 60, f"the page's state is one of {states}")


async def test_cut_off_in_every_way_each_record_comes_once_and_in_order(
    open_page: Open, proxy: RoughProxy, server: AsgiServer, tmp_path: Path
) -> None:
    stream = f"cut.{SEED}"
    page = await open_journal(open_page, stream)
    mishaps = Mishaps(page, proxy, server, SEED)
    allowed = tmp_path / "allowed"
    allowed.write_text("0")
    command = [sys.executable, "-m", "tests.browser.live_appender", stream]
    with contextlib.ExitStack() as stack:
        for i, writer in enumerate(WRITERS):
            appender = Child([*command, writer, str(SEED + i), str(allowed)], cwd=ROOT, name=writer)
            stack.enter_context(appender)
        for number in range(1, MISHAPS + 1):
            (tmp_path / "next").write_text(str(EACH * number // MISHAPS))
            (tmp_path / "next").replace(allowed)
            await mishaps.next()
            if number == MISHAPS // 3:
                await mishaps.server_killed()

        async def all_appended() -> bool:
            return (await Stream(stream).ainfo()).write_cursor == 2 * EACH

        await wait_until_async(all_appended, 120, "all are appended", poll=0.05)
    journal = await reached(page, stream)
    assert journal.positions == list(range(2 * EACH)), mishaps.happened
    assert journal.of("expired") == journal.of("error") == []
    for writer in WRITERS:
        numbers = [data["n"] for _, data in journal.of("record") if data["writer"] == writer]
        assert numbers == list(range(EACH))
    assert len(journal.of("subscribed")) >= MISHAPS // 2, mishaps.happened


async def test_what_was_trimmed_is_told_and_every_later_record_comes(
    open_page: Open, proxy: RoughProxy
) -> None:
    log = Stream("trimmed")
    page = await open_journal(open_page, "trimmed")
    await log.aappend_many([{"data": n} for n in range(50)])
    await reached(page, "trimmed")
    proxy.refusing = True
    proxy.cut()
    await log.aappend_many([{"data": n} for n in range(50, 150)])
    await log.atrim(max_records=10)
    proxy.refusing = False
    # `resume` is where the trim left us, so the head is only reached by way of the notice.
    await reached(page, "trimmed")
    await log.aappend_many([{"data": n} for n in range(150, 160)])
    journal = await reached(page, "trimmed")
    assert journal.positions == [*range(50), *range(150, 160)]
    ((told,),) = journal.of("expired")
    assert {name: told[name] for name in ("reason", "requested", "first", "cursor")} == {
        "reason": "trimmed",
        "requested": 50,
        "first": 140,
        "cursor": 150,
    }


async def test_epoch_rotated_while_connected_is_told_and_every_later_record_comes(
    open_page: Open,
) -> None:
    log = Stream("rotated")
    await log.aappend_many([{"data": n} for n in range(20)])
    page = await open_journal(open_page, "rotated", options={"resume": "", "from": "first"})
    await reached(page, "rotated")
    await log.arotate_epoch()
    await log.aappend_many([{"data": n} for n in range(20, 25)])
    journal = await reached(page, "rotated")
    told = [info["reason"] for (info,) in journal.of("expired")]
    assert told == ["epoch"]
    # From the notice on, none is missing.
    (cursor,) = [info["cursor"] for (info,) in journal.of("expired")]
    assert journal.positions == [*range(20), *range(cursor, 25)]


async def test_server_killed_and_started_again_under_daphne(
    open_page: Open, proxy: RoughProxy
) -> None:
    log, uvicorn = Stream("daphne"), proxy.server_port
    with private_asgi(server="daphne", env=environment()) as daphne:
        proxy.server_port = daphne.port
        try:
            page = await open_journal(open_page, "daphne")
            await log.aappend_many([{"data": n} for n in range(600)])
            await reached(page, "daphne")
            daphne.kill()
            await log.aappend_many([{"data": n} for n in range(600, 1200)])
            daphne.restart()
            assert (await reached(page, "daphne")).positions == list(range(1200))
        finally:
            proxy.server_port = uvicorn


async def test_appended_between_render_and_connect(open_page: Open) -> None:
    rendered, may_connect = asyncio.Event(), asyncio.Event()

    async def hold(route: Route) -> None:
        rendered.set()
        await may_connect.wait()
        await route.continue_()

    await Stream("born").aappend({"n": "before"})
    opening = asyncio.create_task(
        open_journal(open_page, "born", prepare=lambda page: page.route("**/echomq.js", hold))
    )
    await asyncio.wait_for(rendered.wait(), 60)
    await Stream("born").aappend_many([{"data": {"n": n}} for n in range(3)])
    may_connect.set()
    journal = await reached(await opening, "born")
    assert [data["n"] for _, data in journal.of("record")] == [0, 1, 2]


async def test_reloaded_page_goes_on_where_its_handlers_were_done(open_page: Open) -> None:
    page = await open_journal(open_page, "kept", options={"persist": "kept"})
    await Stream("kept").aappend_many([{"data": n} for n in range(5)])
    assert (await reached(page, "kept")).positions == [0, 1, 2, 3, 4]
    await page.evaluate("window.client.close()")
    await Stream("kept").aappend_many([{"data": n} for n in range(5, 8)])
    await page.reload()
    assert (await reached(page, "kept")).positions == [5, 6, 7]


async def test_handler_that_throws_is_reported_to_the_window(open_page: Open) -> None:
    page = await open_journal(open_page, "thrown")
    await page.evaluate(
        """() => {
          window.thrown = [];
          addEventListener("error", (event) => {
            thrown.push(event.message);
            event.preventDefault();
          });
          client.stream("thrown", {
            from: "first",
            onRecord: ({ position }) => { throw new Error(`at ${position}`) },
          });
        }"""
    )
    await Stream("thrown").aappend_many([{"data": n} for n in range(2)])
    await page.wait_for_function("() => thrown.length === 2")
    assert await page.evaluate("thrown") == ["Uncaught Error: at 0", "Uncaught Error: at 1"]
    assert (await reached(page, "thrown")).positions == [0, 1]


async def test_page_of_nobody_is_told_and_tries_no_more(open_page: Open) -> None:
    page = await open_page("journal", "private", prepare=lambda page: page.context.clear_cookies())
    await wait_until_async(lambda: _errors(page), 60, "the page is told")
    (error,) = await _errors(page)
    assert error["code"] == "unauthenticated" and error["final"]


async def test_user_who_logs_out_elsewhere_hears_no_more(open_page: Open) -> None:
    visitor = Client()
    await visitor.aforce_login(await User.objects.aget(username="reader"))
    session = visitor.cookies["sessionid"].value

    async def prepare(page: Page) -> None:
        (cookie,) = await page.context.cookies()
        await page.context.add_cookies([{**cookie, "value": session}])  # type: ignore[typeddict-item]

    page = await open_journal(open_page, "left", prepare)
    await Stream("left").aappend({"n": 0})
    await reached(page, "left")
    await visitor.alogout()
    await expect(page.locator("body")).to_have_attribute("data-state", "closed")
    await Stream("left").aappend({"n": 1})
    (error,) = await _errors(page)
    assert error["code"] == "closed" and "log in" in error["message"]
    assert (await journal_of(page)).positions == [0]


async def _errors(page: Page) -> list[dict[str, Any]]:
    return [error for (error,) in (await journal_of(page)).of("error")]


# The element

ROWS = "ul => [...ul.children].map(row => row.textContent)"


async def test_element_shows_records_as_text_and_keeps_the_newest(open_page: Open) -> None:
    page = await open_page("element", "shown")
    element = page.locator("echomq-stream")
    await expect(element).to_have_attribute("state", "open")
    texts = ["<b onclick=x>&amp;", "two", "three", "four", "five", "six"]
    await Stream("shown").aappend_many([{"data": {"text": text}} for text in texts[:3]])
    await expect(element.locator("li")).to_have_count(3)
    assert await element.locator("ul").evaluate(ROWS) == [
        f"{text} {n}" for n, text in enumerate(texts[:3])
    ]
    await Stream("shown").aappend_many([{"data": {"text": text}} for text in texts[3:]])
    await expect(element.locator("li").last).to_have_text("six 5")
    rows = await element.locator("ul").evaluate(ROWS)
    assert rows == [f"{text} {n}" for n, text in enumerate(texts)][1:]


async def test_element_that_is_moved_stays_and_one_that_is_removed_goes(open_page: Open) -> None:
    page = await open_page("element", "moved")
    element = page.locator("echomq-stream")
    await expect(element).to_have_attribute("state", "open")
    await page.evaluate(
        """() => {
          window.element = document.querySelector('echomq-stream');
          window.heard = [];
          document.addEventListener('echomq:records', ({ detail }) =>
            heard.push(...detail.records.map((record) => record.position)));
          window.subscription = element.subscription;
          document.body.append(document.createElement('main'));
          document.querySelector('main').append(element);
        }"""
    )
    await Stream("moved").aappend({"text": "one"})
    await expect(element.locator("li")).to_have_count(1)
    assert await page.evaluate("!subscription.ended && subscription === element.subscription")
    await page.evaluate("element.remove()")
    assert await page.evaluate("subscription.ended && element.subscription === null")
    await Stream("moved").aappend({"text": "two"})
    await page.evaluate("document.body.append(element)")
    await expect(element.locator("li")).to_have_count(2)
    assert await page.evaluate("heard") == [0, 1]
