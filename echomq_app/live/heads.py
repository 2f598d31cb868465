"""Where all followed streams stand, asked in one statement for hundreds of them.

A stream that nobody writes to costs a poll two look-ups into an index, and neither a statement
nor a timer of its own. Wake-ups make a page quick; the poll makes it sure, and is the rarer the
better the link to the broker and the longer it takes.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Protocol

from .. import engine
from ..conf import current
from ..core.pace import Pace
from ..core.retry import full_jitter
from ..following import OUTBOX_SHARE
from ..models.heads import Head, read_heads
from .threads import DatabaseThreads

logger = logging.getLogger("echomq.live")

CHUNK = 500
"""Streams of one statement: a few milliseconds, so that other reads wait no longer."""
LINKED = 4
"""How many times as long a poll waits while wake-ups come through the broker."""
SHARE, LINKED_SHARE = 0.1, 0.02
"""Of the time, at most, that polls keep the database busy."""


class Followed(Protocol):
    """What is told where its stream stands."""

    name: str

    def saw(self, head: Head) -> None: ...


class Heads:
    """Asks where the streams of one database stand. Belongs to one event loop."""

    def __init__(self, using: str, threads: DatabaseThreads) -> None:
        self._using = using
        self._threads = threads
        self._followed: dict[str, Followed] = {}
        self._asked: dict[str, list[asyncio.Future[Head]]] = {}
        self._with_pending = False
        self._asking: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._outbox = Pace(OUTBOX_SHARE)
        self._failures = 0
        self._seconds = 0.0

    def follow(self, stream: Followed) -> None:
        """Tell a stream's follower from now on where the stream stands."""
        self._followed[stream.name] = stream
        if self._polling is None:
            self._polling = asyncio.ensure_future(self._poll())

    def leave(self, stream: Followed) -> None:
        """Tell it no more; without any follower the polls end."""
        if self._followed.get(stream.name) is stream:
            del self._followed[stream.name]
        if not self._followed and self._polling is not None:
            self._polling.cancel()
            self._polling = None

    async def ask(self, name: str, *, with_pending: bool = False) -> Head:
        """Return where a stream stands in a read that begins after this call.

        All who ask while a read is under way share the next. Raises what the database raises.
        """
        self._with_pending |= with_pending
        future: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self._asked.setdefault(name, []).append(future)
        self._start()
        return await future

    def check(self, name: str) -> None:
        """Have a stream's follower told soon where it stands."""
        self._asked.setdefault(name, [])
        self._start()

    # Parts

    def _start(self) -> None:
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._answer_all())

    async def _answer_all(self) -> None:
        try:
            while self._asked:
                names = list(itertools.islice(self._asked, CHUNK))
                waiting = {name: self._asked.pop(name) for name in names}
                try:
                    await self._answer(waiting)
                except Exception as error:  # noqa: BLE001  (handed to whoever asked)
                    for future in itertools.chain.from_iterable(waiting.values()):
                        if not future.done():
                            future.set_exception(error)
        finally:
            self._asking = None

    async def _answer(self, waiting: dict[str, list[asyncio.Future[Head]]]) -> None:
        look, self._with_pending = self._with_pending, False
        read = partial(self._read, list(waiting), look)
        heads = await self._threads.run(self._using, read, urgent=True)
        for name, futures in waiting.items():
            for future in futures:
                if not future.done():
                    future.set_result(heads[name])
            if name in self._followed:
                self._followed[name].saw(heads[name])

    def _read(self, names: list[str], with_pending: bool) -> dict[str, Head]:
        """In a thread."""
        begun = time.monotonic()
        heads = read_heads(self._using, names, with_pending=with_pending)
        self._seconds += time.monotonic() - begun
        return heads

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._pause())
            try:
                await self._ask_all()
            except Exception as error:  # noqa: BLE001  (polls go on, whatever the database says)
                self._failures += 1
                logger.warning("event=poll_failed streams=%d error=%r", len(self._followed), error)
            else:
                self._failures = 0

    async def _ask_all(self) -> None:
        self._seconds = 0.0
        look = self._outbox.due()
        for names in _chunks(list(self._followed), CHUNK):
            for name in names:
                self._asked.setdefault(name, [])
            # By the time that the last has its answer, so have the others.
            await self.ask(names[-1], with_pending=look)
        if look:
            # Through dead entries, the look takes as long as somebody's snapshot is open.
            self._outbox.took(self._seconds, least=current().POLL_INTERVAL / 2)

    def _pause(self) -> float:
        if self._failures:
            return full_jitter(self._failures, base=0.5, cap=10.0, random=random.random) + 0.1
        poll = current().POLL_INTERVAL
        if engine.link_is_good():
            return max(poll * LINKED, self._seconds / LINKED_SHARE)
        return max(poll, self._seconds / SHARE)


def _chunks(names: list[str], size: int) -> Iterator[list[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
