"""One stream as this process follows it: its newest records, in memory, for all readers.

One task reads what is new, woken by the channel layer and by the poll of all streams
(`heads.py`), and puts it into a ring. What has left the ring comes from the database, by page
(`stream_pages.py`). When the stream begins another life (created, deleted and recreated,
restored, its history replaced), so does the tail: `life` changes, and with it every cursor and
page is void.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import Error

from .. import engine
from ..conf import current
from ..core.names import stream_wake_group
from ..core.pace import Pace
from ..core.retry import full_jitter
from ..core.tokens import verify
from ..exceptions import CursorInvalid, UnknownStream
from ..following import OUTBOX_SHARE
from ..models import paging
from ..models.heads import Head
from ..models.transactions import written
from ..stream import Stream
from .heads import Heads
from .items import Item
from .life import Life
from .pages import Pages
from .stream_pages import StreamPages
from .threads import DatabaseThreads

if TYPE_CHECKING:
    from .reader import Reader

logger = logging.getLogger("echomq.live")

PACE = 0.02
"""Seconds between two reads while records come: a burst reaches pages in few frames."""

T = TypeVar("T")


class StreamTail:
    """Follows one stream while somebody reads it. Belongs to one event loop."""

    def __init__(
        self,
        name: str,
        using: str,
        threads: DatabaseThreads,
        heads: Heads,
        pages: Pages,
        ended: Callable[[StreamTail], None],
    ) -> None:
        self.name = name
        self.using = using
        self.readers: set[Reader] = set()
        self.life: Life | None = None
        self.failure: BaseException | None = None
        """Why the tail ended by itself: `UnknownStream`, or a fault of ours."""
        self.pages = StreamPages(self, pages, threads)
        self._kept = pages
        self._threads = threads
        self._heads = heads
        self._ended = ended
        self._asked: list[asyncio.Future[Life]] = []
        self._promised: list[tuple[int, asyncio.Future[Life]]] = []
        """Who asked, and the head that the stream had by then."""
        self._seen = 0
        self._openers = 0
        self._failures = 0
        self._outbox = Pace(OUTBOX_SHARE)
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._woken = False
        self._group = stream_wake_group(name)
        engine.add_sink(self, (self._group,))
        heads.follow(self)
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

    # For those who have news

    def deliver(self, message: Mapping[str, Any]) -> None:
        """Take a wake-up, from any thread."""
        if message.get("joined"):
            self._call(self._check)
        elif not self._woken:  # once until it reads: in a burst each would wake the loop
            self._woken = True
            self._call(self.poke)

    def gap(self, reason: str) -> None:
        """Hear, in any thread, that a wake-up may have been missed."""
        self._call(self._check)

    def saw(self, head: Head) -> None:
        """Compare where the stream stands with what is known of it."""
        life = self.life
        if life is None:
            return  # it is about to look itself
        if self._is_as_known(life, head):
            life.first = max(life.first, head.first_position)
        else:
            self.poke()

    @staticmethod
    def _is_as_known(life: Life, head: Head) -> bool:
        if head.pending:
            return False
        if not head.epoch:
            return life.precedes_stream
        same = (head.epoch, head.write_cursor) == (life.epoch, life.head)
        return same and head.tail in ("", life.head_tail)

    def poke(self) -> None:
        """Look now whether there is something new."""
        self._news.set()

    def _check(self) -> None:
        self._heads.check(self.name)

    def _call(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            self._loop.call_soon_threadsafe(call)

    # Parts

    async def _run(self) -> None:
        while True:
            self._news.clear()
            self._woken = False  # before it reads: what comes from here on is news
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
                await self._news.wait()

    def _tell_who_asked(self) -> None:
        waiting, self._promised = self._promised, []
        for head, future in waiting:
            if future.done():
                continue
            if self.life is not None and head <= self.life.head:
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
        if life is None or life.precedes_stream:
            return await self._begin_anew()
        snapshot = await self._database(partial(self._read, life.head), urgent=True)
        items = snapshot.records
        broken = verify(snapshot.place, life.token)
        if broken is not None:
            logger.warning("event=tail_broken stream=%s error=%s", self.name, broken)
            life.ended = broken.reason if isinstance(broken, CursorInvalid) else "trimmed"
            self._kept.forget(life)
            return await self._begin_anew()
        life.first, self._seen = snapshot.place.first_position, snapshot.place.write_cursor
        if not items:
            return False, snapshot.pending and await self._database(self._relay)
        self.pages.fit(items)
        life.add(items)
        return True, life.head < snapshot.place.write_cursor

    async def _database(self, call: Callable[[], T], *, urgent: bool = False) -> T:
        return await self._threads.run(self.using, call, urgent=urgent)

    async def _begin_anew(self) -> tuple[bool, bool]:
        """Take up the life that the stream has now; see `_step`."""
        head = await self._heads.ask(self.name, with_pending=self._outbox.due())
        old = self.life
        self._seen = 0  # it begins at the head, and heads of another life say nothing
        self._promised = [(0, future) for _, future in self._promised]
        if not head.epoch:
            # The stream comes into being with what waits, unless that can't be moved yet.
            if head.pending and await self._database(self._relay):
                return False, True
            if old is None:
                self.life = Life.before_stream()
            elif not old.precedes_stream:
                raise UnknownStream(self.name)
            return old is None, False
        if old is None or not old.precedes_stream:
            self.life = Life(head.epoch, head.first_position, head.write_cursor, head.tail)
            return True, False
        # Whoever waited for the stream has seen none of it, so it is read from its beginning.
        self.life = Life(head.epoch, head.first_position, 0, "")
        self._seen = head.write_cursor
        return True, True

    def _read(self, head: int) -> paging.Snapshot[Item]:
        """In a thread: read what is new, and now and then whether more waits in the outbox."""
        look, begun = self._outbox.due(), time.monotonic()
        snapshot = self.pages.read(head, with_pending=look)
        if look:
            self._outbox.took(time.monotonic() - begun, least=current().POLL_INTERVAL / 2)
        return snapshot

    def _relay(self) -> bool:
        """In a thread: move what waits in the outbox; tell whether anything moved."""
        moved: list[int | None] = []
        written(lambda: moved.append(Stream(self.name, using=self.using).relay()))
        if any(moved):
            self._outbox.soon()
        return any(moved)

    def _end_if_alone(self) -> None:
        if not self.readers and not self._openers:
            self._leave()  # at once: nobody may find one that is about to end
            self._task.cancel()

    def _leave(self) -> None:
        engine.remove_sink(self, (self._group,))
        self._heads.leave(self)
        self._ended(self)

    def _done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        self.fail(error or UnknownStream(self.name))
        # Here, not in `fail`: only now has the task handed back whom it was answering.
        for future in (*self._asked, *(future for _, future in self._promised)):
            if not future.done():
                future.set_exception(self.failure or UnknownStream(self.name))

    def fail(self, error: BaseException) -> None:
        """End the tail, and tell everybody that nothing more comes, and why."""
        if self.failure is not None:
            return
        self.failure = error
        self._task.cancel()
        if not isinstance(error, UnknownStream):
            logger.error("event=tail_died stream=%s", self.name, exc_info=error)
        if self.life is not None:
            self._kept.forget(self.life)
        self._leave()
        for reader in tuple(self.readers):
            reader.wake()
