"""What one socket is subscribed to: a stream or events, each behind its window."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol

from .. import events
from ..core.frames import (
    WINDOW_BYTES,
    WINDOW_EVENTS,
    WINDOW_RECORDS,
    CursorExpired,
    Event,
    Gap,
    Records,
    ServerFrame,
    Subscribe,
    Subscribed,
)
from ..core.names import check_queue_name, check_stream_name
from ..core.window import Window
from .hub import Batch, Mask, Reader, hub_of_this_loop
from .items import mask_key

FRAME_RECORDS, FRAME_BYTES = WINDOW_RECORDS // 4, WINDOW_BYTES // 4
READY_EVENTS, HEARD_EVENTS = 100, 2_000
"""Events that wait for room in the window, here and in the feed, which says with a Gap when it is
full. Each subscription has its own, so a socket may hold a hundred times as many."""


class Subscription(Protocol):
    """One `sub` of a socket."""

    action: str
    target: str
    confirmed_at: float
    """`time.monotonic()` of the last time that the user was known to be allowed to read it."""

    @property
    def mask_key(self) -> Hashable:
        """The key of the mask that was in force when it began."""

    async def open(self) -> Subscribed:
        """Begin; return what the client is told."""

    def next(self) -> ServerFrame | None:
        """Return the next frame, if there is one and room for it."""

    def acked(self, cursor: int) -> bool:
        """Make room; tell whether it did."""

    @property
    def full_since(self) -> float | None:
        """Since when (monotonic) nothing more may be sent."""

    @property
    def waits_for_stream(self) -> bool:
        """Whether it is of a stream that doesn't exist."""

    def close(self) -> None:
        """Stop; safe to call twice, and while it opens."""


class Pending:
    """A subscription that nobody has said yes to."""

    action = target = ""
    confirmed_at = 0.0
    mask_key: Hashable = None
    full_since: float | None = None
    waits_for_stream = False

    async def open(self) -> Subscribed:
        raise NotImplementedError

    def next(self) -> None:
        return None

    def acked(self, cursor: int) -> bool:
        return False

    def close(self) -> None:
        pass


class _Windowed:
    """Sends no more than a window of what is unacknowledged."""

    mask_key: Hashable = None
    waits_for_stream = False

    def __init__(self, records: int) -> None:
        self._window = Window(records=records, bytes=WINDOW_BYTES)
        self.confirmed_at = time.monotonic()
        self.full_since: float | None = None

    def acked(self, cursor: int) -> bool:
        freed = self._window.acked(cursor)
        self._note()
        return freed

    def _note(self) -> None:
        if not self._window.is_full:
            self.full_since = None
        elif self.full_since is None:
            self.full_since = time.monotonic()


class StreamSubscription(_Windowed):
    """The records of a stream."""

    def __init__(self, frame: Subscribe, mask: Mask | None, wake: Callable[[], object]) -> None:
        super().__init__(WINDOW_RECORDS)
        self.action, self.target = "stream.read", frame.stream or ""
        self.mask_key = mask_key(mask)
        self._frame = frame
        self._mask = mask
        self._wake = wake
        self._reader: Reader | None = None

    @property
    def waits_for_stream(self) -> bool:  # type: ignore[override]
        return self._reader is not None and self._reader.waits_for_stream

    async def open(self) -> Subscribed:
        frame = self._frame
        self._reader = reader = await hub_of_this_loop().open(
            self.target,
            frame.place,
            wake=self._wake,
            types=frame.types,
            key=frame.key,
            mask=self._mask,
        )
        opened = reader.opened
        self._window.jumped(opened.cursor)
        return Subscribed(
            sub=frame.sub,
            epoch=opened.epoch,
            cursor=opened.cursor,
            first=opened.first,
            head=opened.head,
            recovered=opened.recovered,
            # Not of the head, while nobody has been told what lies before it.
            resume=opened.resume if opened.recovered else None,
        )

    def next(self) -> Records | CursorExpired | None:
        most, most_bytes = self._window.room
        if self._reader is None or not most:
            return None
        # In parts of the window: the next goes out while the last is being acknowledged.
        taken = self._reader.take(min(most, FRAME_RECORDS), min(most_bytes, FRAME_BYTES))
        if taken is None:
            return None
        sub = self._frame.sub
        if isinstance(taken, Batch):
            # One without records is something to send as well, and to acknowledge.
            number = max(1, len(taken.records))
            self._window.sent(taken.cursor, records=number, bytes=taken.size)
            self._note()
            return Records(
                sub=sub,
                since=taken.since,
                records=taken.records,
                cursor=taken.cursor,
                resume=taken.resume,
                head=taken.head,
            )
        self._window.jumped(taken.cursor)
        self._note()
        return CursorExpired(
            sub=sub,
            reason=taken.reason,
            requested=taken.requested,
            first=taken.first,
            head=taken.head,
            epoch=taken.epoch,
            cursor=taken.cursor,
            resume=taken.resume,
        )

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class EventSubscription(_Windowed):
    """The events of a queue, at most once."""

    def __init__(self, frame: Subscribe, wake: Callable[[], object]) -> None:
        super().__init__(WINDOW_EVENTS)
        self.action, self.target = "events.read", frame.events or ""
        self._sub = frame.sub
        self._wake = wake
        self._ready: deque[events.Event | events.Gap] = deque()
        self._may_hear = asyncio.Event()
        self._joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._number = 0
        self._is_open = False
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Subscribed:
        self._task = asyncio.create_task(self._hear())
        self._task.add_done_callback(self._ended)
        await self._joined
        self._is_open = True
        return Subscribed(sub=self._sub)

    async def _hear(self) -> None:
        async with events.listen(self.target, buffer=HEARD_EVENTS) as feed:
            self._joined.set_result(None)
            async for item in feed:
                self._ready.append(item)
                self._wake()
                while len(self._ready) >= READY_EVENTS:
                    self._may_hear.clear()
                    await self._may_hear.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() and not self._joined.done():
            self._joined.set_exception(task.exception() or RuntimeError())
        self._wake()

    def next(self) -> Event | Gap | None:
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()
        if not self._is_open or not self._ready or self._window.is_full:
            return None
        item = self._ready.popleft()
        self._may_hear.set()
        if isinstance(item, events.Gap):
            return Gap(sub=self._sub, reason=item.reason)
        self._number += 1
        size = 100 + len(str(item.data))
        self._window.sent(self._number, records=1, bytes=size)
        self._note()
        return Event(
            sub=self._sub,
            event=item.event,
            job_id=str(item.job_id),
            data=item.data,
            number=self._number - 1,
        )

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()


def asked_for(frame: Subscribe) -> tuple[str, str]:
    """Return the action and the target that a rule is asked about.

    Raises `InvalidName` for a frame that names no stream and no queue that can be.
    """
    if frame.stream is not None:
        return "stream.read", check_stream_name(frame.stream)
    return "events.read", check_queue_name(frame.events or "")


def subscription_of(
    frame: Subscribe, mask: Mask | None, wake: Callable[[], object]
) -> StreamSubscription | EventSubscription:
    """Make what the frame asks for; `mask` is for a stream's records."""
    if frame.stream is None:
        return EventSubscription(frame, wake)
    return StreamSubscription(frame, mask, wake)
