"""Pages of records from the database, shared by all who read there.

A thousand sockets that come back ask for much the same records. Pages begin at
multiples of their size, so readers at different cursors want the same page; one that is
on its way is waited for, not read again; and the newest read are kept, up to a size in
bytes. Records never change, so a page can only become old by its stream's end of life,
and the life is part of the page's name.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from .items import Filter, Item, size_of

KEPT_BYTES = 4_000_000
KEPT_PAGES = 1_000
_OVERHEAD = 1_000
"""Bytes of a page without records: a filter that matches nothing makes many of those."""


class PageName(NamedTuple):
    """Which page. `start` is a multiple of `size`, but for a filtered page: any cursor."""

    life: object
    start: int
    size: int
    only: Filter


class LoadedPage(msgspec.Struct, kw_only=True, eq=False):
    """The records from a page's start on, and what the stream held then.

    `end` is the cursor after it, past what a filter skipped. `first` above a cursor means
    that what stood there has been trimmed. `head` was the write cursor. One that doesn't
    last is for those who wait for it: its life ended meanwhile.
    """

    name: PageName
    items: list[Item]
    end: int
    end_tail: str
    first: int
    head: int
    lasts: bool
    size: int = 0
    """How many bytes it holds, about: it grows with what is kept for masks."""

    def __post_init__(self) -> None:
        self.size = _OVERHEAD + self.name.only.size + size_of(self.items)

    @property
    def start(self) -> int:
        return self.name.start

    def at(self, cursor: int) -> list[Item]:
        """Return the items from `cursor` on."""
        if not self.items or cursor <= self.items[0].position:
            return self.items
        if self.end - self.items[0].position == len(self.items):  # dense, as without a filter
            return self.items[cursor - self.items[0].position :]
        return [item for item in self.items if item.position >= cursor]


class Pages:
    """The pages of all streams of one event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[PageName, LoadedPage] = OrderedDict()
        self._kept_bytes = 0
        self._coming: dict[PageName, asyncio.Task[LoadedPage]] = {}

    def get(self, name: PageName) -> LoadedPage | None:
        """Return a page if it is here."""
        page = self._kept.get(name)
        if page is not None:
            self._kept.move_to_end(name)
        return page

    def load(
        self, name: PageName, read: Callable[[PageName], Awaitable[LoadedPage]]
    ) -> asyncio.Task[LoadedPage]:
        """Return the task that reads this page, begun now unless it is under way."""
        task = self._coming.get(name)
        if task is None:
            task = asyncio.ensure_future(self._load(name, read))
            self._coming[name] = task
            task.add_done_callback(_heard)
        return task

    def forget(self, life: object) -> None:
        """Drop the pages of a life that has ended."""
        for name in [name for name in self._kept if name.life is life]:
            self._kept_bytes -= self._kept.pop(name).size

    def close(self) -> None:
        """Stop what is under way and drop all."""
        for task in self._coming.values():
            task.cancel()
        self._kept.clear()
        self._kept_bytes = 0

    async def _load(
        self, name: PageName, read: Callable[[PageName], Awaitable[LoadedPage]]
    ) -> LoadedPage:
        try:
            page = await read(name)
        finally:
            del self._coming[name]
        if not page.lasts:
            return page
        old = self._kept.pop(name, None)
        self._kept_bytes += page.size - (old.size if old else 0)
        self._kept[name] = page
        self._shrink()
        return page

    def grew(self, page: LoadedPage, size: int) -> None:
        """Count what a page holds in addition."""
        page.size += size
        if self._kept.get(page.name) is page:
            self._kept_bytes += size
            self._shrink()

    def _shrink(self) -> None:
        kept = self._kept
        while len(kept) > 1 and (self._kept_bytes > KEPT_BYTES or len(kept) > KEPT_PAGES):
            self._kept_bytes -= kept.popitem(last=False)[1].size


def _heard(task: asyncio.Task[LoadedPage]) -> None:
    if not task.cancelled():
        task.exception()  # Told to whoever waited; nobody may have.
