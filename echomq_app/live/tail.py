"""One stream as this process follows it: its newest records, in memory, for all readers.

One task reads what is new, woken by the channel layer and by polling, and puts it into a
ring. What has left the ring comes from the database, by page (`pages.py`). When the
stream begins another life (deleted and made anew, restored, its history replaced), so
does the tail: `life` changes, and with it every cursor and page is void.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from django.db import Error

from .. import engine
from ..conf import current
from ..core.names import stream_wake_group
from ..core.records import token_of
from ..core.retry import full_jitter
from ..core.ring import RingBuffer
from ..core.tokens import parse, verify
from ..exceptions import CursorInvalid, UnknownStream
from ..models import appending, paging
from ..models.transactions import written
from ..stream import Stream
from .items import Filter, Item, size_of
from .pages import LoadedPage, PageName, Pages
from .threads import DatabaseThreads

if TYPE_CHECKING:
    from .reader import Reader

logger = logging.getLogger("echomq.live")

RING_RECORDS = 5_000
RING_BYTES = 8_000_000
PACE = 0.02
"""Seconds between two reads while records come: a burst reaches pages in few frames."""
PAGE_SIZES = (128, 1_024)
PAGES_AHEAD = 2
SMALL_PAGE, LARGE_PAGE = 400_000, 1_600_000
"""Bytes: pages grow and shrink with the records that they hold."""

T = TypeVar("T")


class Life:
    """One life of the stream, as far as this process has seen it."""

    __slots__ = ("ended", "epoch", "first", "head_tail", "ring", "ring_bytes")

    def __init__(self, epoch: str, first: int, head: int, head_tail: str) -> None:
        self.ended = ""
        """Why it is over: `epoch`, `diverged`, `ahead` or `trimmed`."""
        self.epoch = epoch
        self.first = first
        self.head_tail = head_tail
        self.ring: RingBuffer[Item] = RingBuffer(RING_RECORDS, start=head)
        self.ring_bytes = 0

    @property
    def head(self) -> int:
        return self.ring.write_cursor

    @property
    def token(self) -> str:
        return token_of(self.epoch, self.head, self.head_tail)

    def add(self, items: list[Item]) -> None:
        """Take new items into the ring, and let the oldest go by number and by bytes."""
        ring = self.ring
        for item in items:
            if len(ring) == ring.size:
                self.ring_bytes -= len(ring.slice(ring.first, 1)[0].raw)
            ring.append(item)
            self.ring_bytes += len(item.raw)
        while self.ring_bytes > RING_BYTES and len(ring) > 1:
            self.ring_bytes -= len(ring.slice(ring.first, 1)[0].raw)
            ring.discard_below(ring.first + 1)
        if items:
            self.head_tail = items[-1].tail


class StreamTail:
    """Follows one stream while somebody reads it. Belongs to one event loop."""

    def __init__(
        self,
        name: str,
        using: str,
        threads: DatabaseThreads,
        pages: Pages,
        ended: Callable[[StreamTail], None],
    ) -> None:
        self.name = name
        self.using = using
        self.readers: set[Reader] = set()
        self.life: Life | None = None
        self.failure: BaseException | None = None
        """Why the tail ended by itself: `UnknownStream`, or a fault of ours."""
        self._threads = threads
        self._pages = pages
        self._ended = ended
        self._asked: list[asyncio.Future[Life]] = []
        self._promised: list[tuple[int, asyncio.Future[Life]]] = []
        """Who asked, and the head that the stream had by then."""
        self._seen = 0
        self._openers = 0
        self._failures = 0
        self._page_size = PAGE_SIZES[0]
        self._waiter: engine.WakeWaiter | None = None
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._done)

    # For readers

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the tail while a reader is on its way."""
        self._openers += 1
        try:
            yield
        finally:
            self._openers -= 1
            self._end_if_alone()

    async def look(self) -> Life:
        """Return the life that a read finds which begins after this call, read to its head.

        All who ask while one read is under way share the next. To the head, or a place that
        is newer than the ring would seem to be of records that the stream hasn't got.
        """
        if self.failure is not None:
            raise self.failure
        future: asyncio.Future[Life] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self.poke()
        return await future

    def leave(self, reader: Reader) -> None:
        """Forget a reader; without any, the tail ends."""
        self.readers.discard(reader)
        self._end_if_alone()

    def page_at(
        self, life: Life, cursor: int, only: Filter, wake: Callable[[], object]
    ) -> LoadedPage | None:
        """Return the page with `cursor` if it is here; else begin to read it, and `wake` then."""
        name = self._page_name(life, cursor, only)
        page = self._pages.get(name)
        if page is not None and (page.end > cursor or page.first > cursor or page.head > cursor):
            return page

        def loaded(task: asyncio.Task[LoadedPage]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None and self.failure is None:
                self._fail(error)
            wake()

        self._pages.load(name, self._read_page).add_done_callback(loaded)
        return None

    def prefetch(self, life: Life, cursor: int, only: Filter) -> None:
        """Begin to read what a reader wants next, unless it is here or in the ring."""
        ahead = 1 if only else PAGES_AHEAD
        for wanted in range(cursor, cursor + ahead * self._page_size, self._page_size):
            if wanted < life.ring.first:
                self.page_at(life, wanted, only, bool)

    async def tail_before(self, life: Life, cursor: int) -> str:
        """Return what a token for `cursor` has to end with; empty when nothing can tell."""
        if cursor == life.head:
            return life.head_tail
        before = cursor - 1
        if before < life.first or before >= life.head:
            return ""
        if before >= life.ring.first:
            return life.ring.slice(before, 1)[0].tail
        name = self._page_name(life, before, Filter())
        page = self._pages.get(name)
        if page is None or page.end <= before:
            page = await asyncio.shield(self._pages.load(name, self._read_page))
        items = page.at(before)
        return items[0].tail if items and items[0].position == before else ""

    # Parts

    async def _run(self) -> None:
        with engine.waiter(stream_wake_group(self.name)) as waiter:
            self._waiter = waiter
            while True:
                waiter.clear()
                asked, self._asked = self._asked, []
                try:
                    came, more = await self._step()
                except BaseException:
                    self._asked = asked + self._asked
                    if not await self._may_go_on():
                        raise
                    continue
                self._failures = 0
                self._promised += [(self._seen, future) for future in asked]
                self._tell_who_asked()
                if came:
                    for reader in tuple(self.readers):
                        reader.wake()
                    await asyncio.sleep(0 if more else PACE)
                if not more:
                    await waiter.wait_async(current().POLL_INTERVAL)

    def _tell_who_asked(self) -> None:
        waiting, self._promised = self._promised, []
        for head, future in waiting:
            if future.done() or self.life is None:
                continue
            if head <= self.life.head:
                future.set_result(self.life)
            else:
                self._promised.append((head, future))

    async def _may_go_on(self) -> bool:
        """Tell whether the error being handled is the database's, after a pause."""
        error = sys.exception()
        if not isinstance(error, Error):
            return False
        self._failures += 1
        logger.warning("event=tail_failed stream=%s error=%r", self.name, str(error).strip())
        await asyncio.sleep(full_jitter(self._failures, base=0.2, cap=5.0, random=random.random))
        return True

    async def _step(self) -> tuple[bool, bool]:
        """Read what is new; return whether something came, and whether there is more."""
        life = self.life
        if life is None:
            await self._begin_anew()
            return True, False
        read = partial(self._read, life.head, Filter(), self._page_size)
        snapshot = await self._database(read, urgent=True)
        items = snapshot.records
        broken = verify(snapshot.place, life.token)
        if broken is not None:
            logger.warning("event=tail_broken stream=%s error=%s", self.name, broken)
            life.ended = broken.reason if isinstance(broken, CursorInvalid) else "trimmed"
            self._pages.forget(life)
            await self._begin_anew()
            return True, False
        life.first, self._seen = snapshot.place.first_position, snapshot.place.write_cursor
        if not items:
            return False, snapshot.pending and await self._database(self._relay)
        self._fit_page_size(items)
        life.add(items)
        return True, life.head < snapshot.place.write_cursor

    async def _database(self, call: Callable[[], T], *, urgent: bool = False) -> T:
        return await self._threads.run(self.using, call, urgent=urgent)

    async def _begin_anew(self) -> None:
        self.life = await self._database(self._begin, urgent=True)
        self._seen = 0  # it begins at the head, and heads of another life say nothing
        self._promised = [(0, future) for _, future in self._promised]

    def _begin(self) -> Life:
        """In a thread: begin at the head. Who asks for a stream first creates it."""
        try:
            info = paging.read_info(self.using, self.name)
        except UnknownStream:
            never_seen = self.life is None
            if not (never_seen and written(partial(appending.ensure, self.using, self.name))):
                raise
            info = paging.read_info(self.using, self.name)
        token = parse(info.token)
        head_tail = token.tail if token else ""
        return Life(info.epoch, info.first_position, info.write_cursor, head_tail)

    def _read(self, cursor: int, only: Filter, limit: int) -> paging.Snapshot[Item]:
        """In a thread: read a page as it is stored."""
        return paging.read_stored_page(
            self.using,
            self.name,
            cursor,
            Item,
            limit=limit,
            window=max(current().FILTER_WINDOW, limit),
            types=only.types,
            key=only.key,
            with_pending=not only,
        )

    def _relay(self) -> bool:
        """In a thread: move what waits in the outbox; tell whether anything moved."""
        moved: list[int | None] = []
        written(lambda: moved.append(Stream(self.name, using=self.using).relay()))
        return any(moved)

    async def _read_page(self, name: PageName) -> LoadedPage:
        for attempt in itertools.count(1):
            if self.failure is not None:
                raise self.failure  # nobody waits for it any more
            try:
                read = partial(self._read, name.start, name.only, name.size)
                snapshot = await self._database(read)
                break
            except Error as error:
                logger.warning("event=page_failed stream=%s error=%r", self.name, str(error))
                await asyncio.sleep(full_jitter(attempt, base=0.2, cap=5.0, random=random.random))
        place, items = snapshot.place, snapshot.records
        life = self.life
        if life is None or place.epoch != life.epoch:
            # Another life; whoever wanted this page finds the new one when it is told.
            await self.look()
            return LoadedPage(
                start=name.start,
                items=[],
                size=0,
                end=name.start,
                end_tail="",
                first=0,
                head=0,
                lasts=False,
            )
        if not name.only:
            self._fit_page_size(items)
        return LoadedPage(
            start=name.start,
            items=items,
            size=size_of(items),
            end=snapshot.end_cursor,
            end_tail=snapshot.end_tail,
            first=place.first_position,
            head=place.write_cursor,
            lasts=life is name.life and self.failure is None,
        )

    def _page_name(self, life: Life, cursor: int, only: Filter) -> PageName:
        size = self._page_size
        return PageName(life, cursor if only else cursor - cursor % size, size, only)

    def _fit_page_size(self, items: list[Item]) -> None:
        size = size_of(items)
        smallest, largest = PAGE_SIZES
        if size > LARGE_PAGE:
            self._page_size = max(smallest, self._page_size // 2)
        elif len(items) == self._page_size and size < SMALL_PAGE:
            self._page_size = min(largest, self._page_size * 2)

    def poke(self) -> None:
        """Look now whether there is something new."""
        if self._waiter is not None:
            self._waiter.set()

    def _end_if_alone(self) -> None:
        if not self.readers and not self._openers:
            self._ended(self)  # at once: nobody may find one that is about to end
            self._task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self._fail(error or UnknownStream(self.name))

    def _fail(self, error: BaseException) -> None:
        """Tell everybody that nothing more comes, and why."""
        if self.failure is not None:
            return
        self.failure = error
        self._task.cancel()
        if not isinstance(error, UnknownStream):
            logger.error("event=tail_died stream=%s", self.name, exc_info=error)
        for future in (*self._asked, *(future for _, future in self._promised)):
            if not future.done():
                future.set_exception(error)
        if self.life is not None:
            self._pages.forget(self.life)
        self._ended(self)
        for reader in tuple(self.readers):
            reader.wake()
