"""What has left a stream's ring: read by page, ahead of the readers, in sizes that suit it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from django.db import Error

from ..conf import current
from ..core.retry import full_jitter
from ..models import paging
from .items import EVERYTHING, Filter, Item, size_of
from .life import Life
from .pages import LoadedPage, PageName, Pages
from .threads import DatabaseThreads

if TYPE_CHECKING:
    from .tail import StreamTail

logger = logging.getLogger("echomq.live")

PAGE_SIZES = (128, 1_024)
PAGES_AHEAD = 2
SMALL_PAGE, LARGE_PAGE = 400_000, 1_600_000
"""Bytes: pages grow and shrink with the records that they hold."""


class StreamPages:
    """The pages of one tail's stream. Belongs to its event loop."""

    def __init__(self, tail: StreamTail, kept: Pages, threads: DatabaseThreads) -> None:
        self._tail = tail
        self._kept = kept
        self._threads = threads
        self._size = PAGE_SIZES[0]

    def at(
        self, life: Life, cursor: int, only: Filter, wake: Callable[[], object]
    ) -> LoadedPage | None:
        """Return the page with `cursor` if it is here; else begin to read it, and `wake` then."""
        name = self._page_name(life, cursor, only)
        page = self._kept.get(name)
        if page is not None and (page.end > cursor or page.first > cursor or page.head > cursor):
            return page

        def loaded(task: asyncio.Task[LoadedPage]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and self._tail.failure is None:
                self._tail.fail(error)
            wake()

        self._kept.load(name, self._read_page).add_done_callback(loaded)
        return None

    def prefetch(self, life: Life, cursor: int, only: Filter) -> None:
        """Begin to read what a reader wants next, unless it is here or in the ring."""
        ahead = 1 if only else PAGES_AHEAD
        for wanted in range(cursor, cursor + ahead * self._size, self._size):
            if wanted < life.ring.first:
                self.at(life, wanted, only, bool)

    def grew(self, page: LoadedPage, size: int) -> None:
        """Count what a page holds in addition."""
        self._kept.grew(page, size)

    async def tail_before(self, life: Life, cursor: int) -> str:
        """Return what a token for `cursor` has to end with; empty when nothing can tell."""
        if cursor == life.head:
            return life.head_tail
        before = cursor - 1
        if before < life.first or before >= life.head:
            return ""
        if before >= life.ring.first:
            return life.ring.slice(before, 1)[0].tail
        name = self._page_name(life, before, EVERYTHING)
        page = self._kept.get(name)
        if page is None or page.end <= before:
            page = await asyncio.shield(self._kept.load(name, self._read_page))
        items = page.at(before)
        return items[0].tail if items and items[0].position == before else ""

    def read(
        self,
        cursor: int,
        only: Filter = EVERYTHING,
        limit: int = 0,
        *,
        with_pending: bool = False,
    ) -> paging.Snapshot[Item]:
        """In a thread: read a page as it is stored, of the size that suits the stream."""
        limit = limit or self._size
        return paging.read_stored_page(
            self._tail.using,
            self._tail.name,
            cursor,
            Item,
            limit=limit,
            window=max(current().FILTER_WINDOW, limit),
            types=only.types,
            key=only.key,
            with_pending=with_pending,
        )

    def fit(self, items: list[Item]) -> None:
        """Have pages grow or shrink with what they hold."""
        size = size_of(items)
        smallest, largest = PAGE_SIZES
        if size > LARGE_PAGE:
            self._size = max(smallest, self._size // 2)
        elif len(items) == self._size and size < SMALL_PAGE:
            self._size = min(largest, self._size * 2)

    async def _read_page(self, name: PageName) -> LoadedPage:
        for attempt in itertools.count(1):
            if self._tail.failure is not None:
                raise self._tail.failure  # nobody waits for it any more
            try:
                read = partial(self.read, name.start, name.only, name.size)
                snapshot = await self._threads.run(self._tail.using, read)
                break
            except Error as error:
                logger.warning("event=page_failed stream=%s error=%r", self._tail.name, str(error))
                await asyncio.sleep(full_jitter(attempt, base=0.2, cap=5.0, random=random.random))
        place, items = snapshot.place, snapshot.records
        life = self._tail.life
        if life is None or place.epoch != life.epoch:
            # Another life; whoever wanted this page finds the new one when it is told.
            await self._tail.look()
            return LoadedPage(
                name=name,
                items=[],
                end=name.start,
                end_tail="",
                first=0,
                head=0,
                lasts=False,
            )
        if not name.only:
            self.fit(items)
        return LoadedPage(
            name=name,
            items=items,
            end=snapshot.end_cursor,
            end_tail=snapshot.end_tail,
            first=place.first_position,
            head=place.write_cursor,
            lasts=life is name.life and self._tail.failure is None,
        )

    def _page_name(self, life: Life, cursor: int, only: Filter) -> PageName:
        size = self._size
        return PageName(life, cursor if only else cursor - cursor % size, size, only)
