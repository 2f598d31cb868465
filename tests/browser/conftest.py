"""A real Chromium on a real server, with a real worker and broker.

The site runs for a whole module: its server, worker and Redis take seconds to start.
`fresh` gives each test a cleared log instead of an emptied database.

Everything is async, because Playwright's sync API keeps an event loop running in the
thread, and then neither Django's ORM nor pytest-asyncio work there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from django.core.management import call_command
from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    async_playwright,
    expect,
)
from pytest_django import DjangoDbBlocker

from project.children import Child
from project.seismic.quakes import QUEUE
from tests.browser.seismic import Seismic
from tests.servers import AsgiServer, private_asgi, private_redis

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
TIMEOUT = 150_000  # ms; a machine with two suites on it is slow
expect.set_options(timeout=TIMEOUT)

CONNECTION_GONE = re.compile(
    r"WebSocket connection to .* failed|net::ERR_(CONNECTION_\w+|EMPTY_RESPONSE|INCOMPLETE)"
)
"""What Chromium itself reports when a server goes away."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """The running parts, and what it takes to start another server beside them."""

    server: AsgiServer
    env: dict[str, str]
    without_broker: dict[str, str]


OpenPage = Callable[..., Awaitable[Seismic]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    """Give one browser for the module; each page has a context of its own."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"there is no Chromium on PATH (looked for {', '.join(NAMES)})")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        await browser.close()


@pytest.fixture(scope="module")
def transactional_db(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[None]:
    """Take the place of pytest-django's: it would empty the tables under a running site."""
    with django_db_blocker.unblock():
        yield
        call_command("flush", interactive=False, verbosity=0)


@pytest.fixture(scope="module")
def site(chromium: Browser, transactional_db: None) -> Iterator[Site]:
    """Give the project on the test database: uvicorn, a worker, a broker."""
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(private_redis())
        plain = dict(os.environ)
        env = {**plain, "ECHOMQ_REDIS_URL": redis.url}
        command = [sys.executable, "manage.py", "echomq_worker", "--queue", QUEUE]
        worker = Child(command, env=env, cwd=ROOT, name="echomq_worker")
        stack.enter_context(worker).wait_for_output(r"Worker .* is ready")
        server = stack.enter_context(private_asgi(env=env))
        yield Site(server=server, env=env, without_broker=plain)


@pytest_asyncio.fixture(loop_scope="module")
async def open_page(chromium: Browser, tmp_path: Path) -> AsyncIterator[OpenPage]:
    """Give a function that opens the page at an address, as a visitor of its own.

    A message on the console, an exception or a breach of the policy fails the test; with
    `may_lose_server=True`, not what the browser says about a server that is gone.
    """
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    async def open_at(url: str, *, may_lose_server: bool = False, **options: Any) -> Seismic:
        context = await chromium.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(TIMEOUT)
        page = await context.new_page()
        _watch(page, problems, ignore=CONNECTION_GONE if may_lose_server else None)
        seismic = Seismic(page, tmp_path)
        await page.goto(url)
        await seismic.connected()
        return seismic

    yield open_at
    for context in contexts:
        await context.close()
    assert problems == []


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(site: Site, open_page: OpenPage) -> Seismic:
    """Give a page on an empty log, with no replay under way."""
    page = await open_page(site.server.url)
    await page.cancel_if_running()
    await page.clear_log()
    return page


def _watch(page: Page, problems: list[str], *, ignore: re.Pattern[str] | None) -> None:
    def on_console(message: ConsoleMessage) -> None:
        if not (ignore and ignore.search(message.text)):
            problems.append(f"console {message.type}: {message.text} ({message.location})")

    page.on("console", on_console)
    page.on("pageerror", lambda error: problems.append(f"exception: {error}"))
