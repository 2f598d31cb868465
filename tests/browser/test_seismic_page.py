"""The seismic page in a real Chromium: what the feed loses and the log doesn't."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from playwright.async_api import expect

from project.seismic.quakes import TOTAL, week
from tests.browser.conftest import OpenPage, Site
from tests.browser.rough_proxy import rough_proxy
from tests.browser.seismic import LASTING, Seismic
from tests.servers import private_asgi

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # Seconds on an idle machine. On a busy one a browser is what suffers most.
    pytest.mark.timeout(300),
]

ALL = [[position, quake["id"]] for position, quake in enumerate(week())][::-1]
"""What a complete list shows: every earthquake once, the newest on top."""


async def test_page_that_was_offline_ends_with_the_list_of_one_that_was_not(
    fresh: Seismic, site: Site, open_page: OpenPage
) -> None:
    dropped = await open_page(site.server.url)
    await fresh.start(slider=LASTING)
    await asyncio.gather(dropped.at_least("log-came", 100), fresh.at_least("log-came", 100))
    await dropped.drop()
    away_from = await dropped.count("log-came")
    await fresh.at_least("log-came", away_from + 300)
    assert await dropped.count("log-came") == away_from
    await dropped.restore()
    await fresh.hurry()

    for page in (fresh, dropped):
        await expect(page.figure("log-came")).to_have_text("1,707")
        assert await page.rows("log-list") == ALL
        await expect(page.figure("log-missing")).to_have_text("0")
    await expect(dropped.story).to_contain_text("the log lost nothing")
    feed = await dropped.feed()
    assert feed.lost == len(feed.missing) >= 100
    assert {*feed.heard} == {*range(TOTAL)} - feed.missing
    # The one that stayed lost nothing: the broker was there all the time.
    await expect(fresh.figure("feed-lost")).to_have_text("0")
    assert await fresh.rows("feed-list") == ALL
    await dropped.screenshot("dropped")

    await fresh.finished()
    await fresh.start()
    await expect(fresh.state).to_have_text(
        "Done. Nothing was added: all 1,707 were in the log already."
    )
    assert await fresh.rows("log-list") == ALL


async def test_server_killed_and_started_again_leaves_no_hole(
    fresh: Seismic, site: Site, open_page: OpenPage
) -> None:
    with private_asgi(env=site.env) as server:
        page = await open_page(server.url, may_lose_server=True)
        await fresh.start(slider=LASTING)
        await page.at_least("log-came", 100)
        server.kill()
        await expect(page.page.locator("#connection")).to_have_attribute(
            "data-state", re.compile("waiting|connecting")
        )
        away_from = await page.count("log-came")
        await fresh.at_least("log-came", away_from + 200)
        server.restart()
        await page.connected()
        await fresh.hurry()
        await expect(page.figure("log-came")).to_have_text("1,707")
        assert await page.rows("log-list") == ALL
        await expect(page.story).to_contain_text("The connection broke at position")
        await expect(page.story).to_contain_text("the log lost nothing")
        feed = await page.feed()
        assert feed.lost == len(feed.missing) >= 100


async def test_line_that_went_dead_without_a_word_is_noticed_and_leaves_no_hole(
    fresh: Seismic, site: Site, open_page: OpenPage
) -> None:
    """A laptop that woke up in another network: both ends believe that they are connected."""
    async with rough_proxy(site.server.port) as proxy:
        page = await open_page(f"http://127.0.0.1:{proxy.port}/", may_lose_server=True)
        await page.page.clock.install()
        await page.page.reload()
        await page.connected()
        await fresh.start(slider=LASTING)
        await page.at_least("log-came", 100)
        # From now on its clock goes when we say so: a slow machine isn't a dead line.
        await page.page.clock.pause_at(await page.page.evaluate("Date.now() / 1000") + 1)
        proxy.swallow()
        await fresh.hurry()
        await fresh.finished()
        away_from = await page.count("log-came")
        assert away_from < TOTAL
        await expect(page.page.locator("#connection")).to_have_attribute("data-state", "open")
        await page.page.clock.fast_forward(15_000)  # the silence after which a line is dead
        await page.page.clock.resume()
        await expect(page.figure("log-came")).to_have_text("1,707")
        assert await page.rows("log-list") == ALL
        await expect(page.story).to_contain_text("The connection broke at position")
        await expect(page.story).to_contain_text("the log lost nothing")
        # Of the other connections, which brought the page, each is found dead in its turn.
        await expect(page.state).to_have_attribute("data-state", "completed", timeout=120_000)
        await page.page.close()  # before its line goes


async def test_cancel_from_the_page_stops_the_job_and_everybody_sees_why(
    fresh: Seismic, site: Site, open_page: OpenPage
) -> None:
    other = await open_page(site.server.url)
    await fresh.start(slider=45)
    await fresh.at_least("log-came", 10)
    await fresh.cancel("seen enough")
    for page in (fresh, other):
        await expect(page.state).to_have_text("Cancelled: seen enough.")
    # It has stopped: another page that comes now finds the log as it is and stays so.
    came = await fresh.count("log-came")
    assert came < TOTAL
    late = await open_page(site.server.url)
    await late.at_least("log-came", came)
    assert (await late.rows("log-list"))[-1] == ALL[-1]
    assert await late.count("feed-history") == await late.count("log-came")
    assert await late.count("feed-lost") == 0


async def test_cleared_log_shows_as_a_new_epoch_on_every_page(
    fresh: Seismic, site: Site, open_page: OpenPage
) -> None:
    other = await open_page(site.server.url)
    await fresh.start(slider=45)
    await asyncio.gather(fresh.at_least("log-came", 5), other.at_least("log-came", 5))
    await fresh.cancel("")
    await expect(fresh.state).to_have_text("Cancelled: no reason given.")
    epoch = await other.page.locator("#epoch").inner_text()
    await fresh.clear_log()
    await expect(other.page.locator("#log-list > li")).to_have_count(0)
    await expect(other.story).to_contain_text("The log was cleared")
    await fresh.start(slider=45)
    await asyncio.gather(fresh.at_least("log-came", 5), other.at_least("log-came", 5))
    await expect(other.page.locator("#epoch")).not_to_have_text(epoch)
    # The counter may be painted before the list.
    await expect(other.page.locator("#log-list [data-position]").first).to_be_visible()
    assert (await other.rows("log-list"))[-1] == ALL[-1]
    await fresh.cancel_if_running()


async def test_without_a_broker_the_page_says_that_only_the_log_crosses_processes(
    fresh: Seismic, site: Site, open_page: OpenPage
) -> None:
    await expect(fresh.page.get_by_text("No broker:")).to_be_hidden()
    # Under daphne, so that both servers have had the page.
    with private_asgi(server="daphne", env=site.without_broker) as server:
        page = await open_page(server.url)
        notice = page.page.locator("#no-broker")
        await expect(notice).to_be_visible()
        await expect(notice).to_contain_text("the feed does not cross processes; the log does")
        await page.start(slider=75)
        await page.at_least("log-came", 50)
        await page.at_least("feed-lost", 20)
        assert await page.count("feed-came") == 0
        await page.cancel("it works")
        await expect(page.state).to_have_text("Cancelled: it works.")
        await page.screenshot("without-broker")
        await page.page.close()  # before its server goes


async def test_keyboard_alone_is_enough(fresh: Seismic) -> None:
    keyboard = fresh.page.keyboard
    await fresh.page.get_by_label("Speed").focus()
    await keyboard.press("Home")
    for _ in range(4):
        await keyboard.press("PageUp")
    await keyboard.press("Tab")
    await keyboard.press("Enter")
    await fresh.at_least("log-came", 1)
    reason = fresh.page.get_by_label("Reason")
    await expect(reason).to_be_enabled()  # else the focus stays, and what is typed presses Start
    await reason.focus()
    await keyboard.type("by key")
    await keyboard.press("Enter")
    await expect(fresh.state).to_have_text("Cancelled: by key.")
    await fresh.page.get_by_role("switch", name="Drop my connection").focus()
    await keyboard.press("Space")
    await expect(fresh.page.locator("#connection")).to_have_text("dropped by you")


async def test_who_presses_start_twice_starts_once(fresh: Seismic) -> None:
    sent: list[str] = []
    fresh.page.on("request", lambda one: sent.append(one.url) if one.method == "POST" else None)
    await fresh.page.locator("#start").evaluate(
        "form => { form.requestSubmit(); form.requestSubmit(); }"
    )
    await fresh.at_least("log-came", 1)
    await expect(fresh.state).to_have_attribute("data-state", "running")
    await expect(fresh.page.locator("#error")).to_be_empty()
    assert len(sent) == 1
    await fresh.cancel_if_running()


VISITORS: dict[str, dict[str, Any]] = {
    "laptop": {"viewport": {"width": 1366, "height": 768}, "color_scheme": "light"},
    "tablet": {"viewport": {"width": 820, "height": 1100}, "color_scheme": "dark"},
    "phone": {
        "viewport": {"width": 360, "height": 740},
        "color_scheme": "dark",
        "has_touch": True,
        "is_mobile": True,
    },
}

LOW_CONTRAST = """() => {
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (channel) => {
    const part = channel / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  };
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || element.closest(":disabled, [hidden], noscript, script")) continue;
    const [a, b] = [parse(getComputedStyle(element).color), ground(element)].map(luminance);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${element.tagName}.${element.className} ${ratio.toFixed(2)}`);
  }
  return [...new Set(found)];
}"""


@pytest.mark.parametrize("visitor", VISITORS)
async def test_page_fits_and_can_be_read(
    visitor: str, fresh: Seismic, site: Site, open_page: OpenPage
) -> None:
    page = await open_page(site.server.url, **VISITORS[visitor])
    await fresh.start(slider=45)
    await page.at_least("log-came", 40)
    await page.drop()
    away_from = await page.count("log-came")
    await fresh.at_least("log-came", away_from + 20)
    await page.restore()
    await page.at_least("feed-lost", 1)
    await page.screenshot(visitor)
    await fresh.cancel_if_running()
    width = await page.page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert width[0] <= width[1]
    assert await page.page.evaluate(LOW_CONTRAST) == []
    inline = "[...document.querySelectorAll('[style], style')].map(found => found.outerHTML)"
    assert await page.page.evaluate(inline) == []


async def test_nothing_inline_and_a_policy_that_forbids_it(fresh: Seismic, site: Site) -> None:
    response = await fresh.page.request.get(site.server.url)
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "style-src 'self'" in policy
    assert "unsafe" not in policy
    markup = await response.text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", markup)
