"""The seismic page as a visitor uses it: by role and label, never by timing."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

from playwright.async_api import Locator, Page, expect

SPEED_TOP = 100
"""At which the week is over in a second, before a busy machine's browser has looked."""
LASTING = 50
"""The week takes half a minute: something can happen in the middle of it."""

ROWS = """list => [...list.querySelectorAll('[data-position]')].map(
  row => [+row.dataset.position, row.dataset.id])"""
# In one go: between two looks the page may have been painted again.
FEED = """column => ({
  lost: +column.querySelector('#feed-lost').textContent.replaceAll(',', ''),
  heard: [...column.querySelectorAll('[data-position]')].map(row => +row.dataset.position),
  gaps: [...column.querySelectorAll('.gap')].map(gap => [+gap.dataset.from, +gap.dataset.to]),
})"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedList:
    """What the feed's column shows at one moment."""

    lost: int
    heard: list[int]
    gaps: list[tuple[int, int]]

    @property
    def missing(self) -> set[int]:
        """The positions that the marks of gaps stand for."""
        return {position for start, to in self.gaps for position in range(start, to)}


class Seismic:
    """One open page."""

    def __init__(self, page: Page, folder: Path) -> None:
        self.page = page
        self._folder = folder

    # What it shows

    @property
    def state(self) -> Locator:
        return self.page.locator("#job-state")

    @property
    def story(self) -> Locator:
        return self.page.get_by_role("list", name="What happened")

    def figure(self, name: str) -> Locator:
        """Return the counter of this id: `feed-lost`, `log-came` and the like."""
        return self.page.locator(f"#{name}")

    async def count(self, name: str) -> int:
        return int((await self.figure(name).inner_text()).replace(",", ""))

    async def rows(self, name: str) -> list[list[Any]]:
        """Return [position, USGS id] of each row of `feed-list` or `log-list`, top first."""
        rows: list[list[Any]] = await self.page.locator(f"#{name}").evaluate(ROWS)
        return rows

    async def feed(self) -> FeedList:
        return FeedList(**await self.page.locator("#feed-column").evaluate(FEED))

    async def at_least(self, name: str, number: int) -> None:
        """Wait until a counter has reached a number."""
        await self.page.wait_for_function(
            "([id, n]) => +document.getElementById(id).textContent.replaceAll(',', '') >= n",
            arg=[name, number],
        )

    async def connected(self) -> None:
        await expect(self.page.locator("#connection")).to_have_attribute("data-state", "open")

    async def screenshot(self, name: str) -> None:
        """Write the whole page to the test's own folder, for people to look at."""
        # Written here: with `path=` it is done by a thread that outlives the test. And the
        # caret is hidden by style attributes, which one of the tests looks for.
        picture = await self.page.screenshot(full_page=True, caret="initial")
        (self._folder / f"{name}.png").write_bytes(picture)

    # What a visitor does

    async def start(self, slider: int = SPEED_TOP) -> None:
        await self.page.get_by_label("Speed").fill(str(slider))
        await self.page.get_by_role("button", name="Start the replay").click()

    async def hurry(self) -> None:
        """Have what is left come at the highest speed."""
        await self.cancel("faster")
        await self.finished()
        await self.start()

    async def finished(self) -> None:
        await expect(self.state).to_have_attribute(
            "data-state", re.compile("completed|cancelled|failed")
        )

    async def cancel(self, reason: str) -> None:
        await self.page.get_by_label("Reason").fill(reason)
        await self.page.get_by_role("button", name="Cancel").click()

    async def cancel_if_running(self) -> None:
        await expect(self.state).not_to_have_text("Loading.")
        if await self.state.get_attribute("data-state") in {"ready", "scheduled", "running"}:
            await self.cancel("the next test begins")
            await self.finished()

    async def clear_log(self) -> None:
        await self.page.get_by_role("button", name="Clear the log").click()
        await expect(self.page.locator("#log-list > li")).to_have_count(0)

    async def drop(self) -> None:
        await self.page.get_by_role("switch", name="Drop my connection").check()
        await expect(self.page.locator("#connection")).to_have_text("dropped by you")

    async def restore(self) -> None:
        await self.page.get_by_role("switch", name="Drop my connection").uncheck()
        await self.connected()
