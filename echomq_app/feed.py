"""The reading end of the feed: a buffer that anything may fill and one task reads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from . import engine
from .core.event import Event, Gap, from_wire
from .core.names import check_queue_name, events_group
from .core.wakers import Wakers

logger = logging.getLogger("echomq")

EVENTS = "echomq.events"
"""The `type` of a message of events; Channels calls `echomq_events(self, message)`."""


class Feed:
    """Iterates the events of its queues as they come. From `events.listen()`.

    What it may rely on: once `async with` has entered, an event published afterwards
    arrives, at most once, in the order of its publisher, or a `Gap` says that something
    is missing, before anything later. Without a broker, "published" means in this process.

    The engine fills a buffer of `buffer` events; a reader that falls further behind
    loses the newest, and gets a `Gap` where they were. Iterating may be cancelled or timed
    out at any moment (`asyncio.wait_for(anext(feed), 1)`) and loses nothing by it. One
    task reads at a time; the end of the block ends the iteration.
    """

    def __init__(self, queues: tuple[str, ...], buffer: int) -> None:
        if buffer < 1:
            raise ValueError(f"A feed buffers at least 1 event, not {buffer}.")
        self._queues = set(map(check_queue_name, queues))
        self._buffer = buffer
        self._items: deque[Event | Gap] = deque()
        self._wakers = Wakers()
        self._lock = threading.RLock()  # a signal handler may publish, and so fill it
        self._overflowed = False  # what comes is dropped until a Gap has been read
        self._open = False
        # Queues whose reader counts on hearing all, and those of them that weren't joined
        # in time: when they are at last, that is a gap.
        self._promised: set[str] = set()
        self._late: set[str] = set()

    @property
    def queues(self) -> frozenset[str]:
        """The queues that it listens to now."""
        return frozenset(self._queues)

    async def __aenter__(self) -> Self:
        self._open = True
        try:
            await self._join(self._queues)
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    async def subscribe(self, *queues: str) -> None:
        """Listen to these queues too; return when the broker knows (or can't be reached)."""
        new = set(map(check_queue_name, queues)) - self._queues
        self._queues |= new
        if self._open:
            await self._join(new)

    async def unsubscribe(self, *queues: str) -> None:
        """Leave these queues; what they brought so far can still be read."""
        for known in (self._queues, self._promised, self._late):
            known.difference_update(queues)
        engine.remove_sink(self, tuple(map(events_group, queues)))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event | Gap:
        while not self._items:
            if not self._open:
                raise StopAsyncIteration
            await self._wakers.wait_async(self._is_ready, None)
        with self._lock:
            item = self._items.popleft()
            if type(item) is Gap:
                self._overflowed = False
        return item

    def deliver(self, message: Mapping[str, Any]) -> None:
        """Take a message from the switchboard, in any thread."""
        if message.get("type") != EVENTS:
            self._joined_at_last(message)
            return
        try:
            events = from_wire(message)
        except (ValueError, KeyError, TypeError):
            logger.exception("event=bad_message message=%.200r", message)
            return
        with self._lock:
            for event in events:
                self._put(event)
        self._wakers.run()

    def gap(self, reason: str) -> None:
        """Hear from the switchboard that events may be missing, in any thread."""
        if self._promised:  # Until then, nobody was told that we hear anything.
            if reason == "reconnect":
                self._late.clear()
            with self._lock:
                self._put_gap(reason)
            self._wakers.run()

    async def _join(self, queues: set[str]) -> None:
        groups = tuple(map(events_group, queues))
        engine.add_sink(self, groups)
        if not await engine.joined(groups):
            logger.warning("event=listen_without_broker queues=%s", ",".join(sorted(queues)))
            self._late |= queues & self._queues
        self._promised |= queues & self._queues

    def _joined_at_last(self, message: Mapping[str, Any]) -> None:
        late = {queue for queue in self._late if events_group(queue) == message.get("group")}
        if late:
            self._late -= late
            self.gap("joined late")

    def _close(self) -> None:
        self._open = False
        engine.remove_sink(self, tuple(map(events_group, self._queues)))
        self._promised.clear()
        self._late.clear()
        self._items.clear()
        self._wakers.run()

    def _is_ready(self) -> bool:
        return bool(self._items) or not self._open

    def _put(self, event: Event) -> None:
        if self._overflowed:
            return
        if len(self._items) >= self._buffer:
            self._overflowed = True
            self._put_gap("overflow")
        else:
            self._items.append(event)

    def _put_gap(self, reason: str) -> None:
        # Two in a row say no more than one.
        if not self._items or type(self._items[-1]) is not Gap:
            self._items.append(Gap(reason=reason))
