"""Readers that go on for ever: where one stands, and how it waits.

A wake-up from the engine makes a reader quick, polling makes it sure. The waiter is
cleared before the page is read, so a record that is committed in between sets it again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager

from . import engine
from .cancel import CancelToken
from .conf import current
from .core.names import stream_wake_group
from .core.pace import Pace
from .core.records import Page
from .core.tokens import requested_cursor

Cursor = int | str | None

OUTBOX_SHARE = 0.05
"""Of the time, at most, to look whether anything waits in the outbox."""


class Follower:
    """One reader's place in a stream, and one step of it.

    `read` returns a page from a cursor and, if asked, whether rows of the stream wait in the
    outbox; `relay` moves those.
    """

    def __init__(
        self,
        read: Callable[[Cursor, bool], tuple[Page, bool]],
        relay: Callable[[], int | None],
        cursor: Cursor,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._relay = relay
        self._place = cursor
        self._clock = clock
        self._outbox = Pace(OUTBOX_SHARE, clock=clock)

    def step(self) -> Page | None:
        """Return the next page if the cursor moved, `None` if there is nothing new yet.

        Goes on by token, never by number: a stream that was deleted and made anew between
        two steps is another epoch, not an old cursor that happens to fit.
        """
        look, begun = self._outbox.due(), self._clock()
        page, pending = self._read(self._place, look)
        if look:
            self._outbox.took(self._clock() - begun, least=current().POLL_INTERVAL / 2)
        if not page.records and pending and self._relay():
            self._outbox.soon()
            page, _ = self._read(self._place, False)
        asked = requested_cursor(self._place)[0]
        self._place = page.token
        before = page.first_position if asked is None else asked
        return page if page.records or page.cursor != before else None


def pages(name: str, follower: Follower, stop: CancelToken | None) -> Iterator[Page]:
    """Iterate a follower's pages, waiting between them, until `stop` is cancelled."""
    with _waiting(name, stop) as waiter:
        while not (stop and stop.cancelled):
            waiter.clear()
            page = follower.step()
            if page is not None:
                yield page
            else:
                waiter.wait(current().POLL_INTERVAL)


async def apages(
    name: str,
    follower: Follower,
    stop: CancelToken | None,
    in_thread: Callable[[Callable[[], Page | None]], Awaitable[Page | None]],
) -> AsyncIterator[Page]:
    """See `pages`. Cancelling the task ends it too."""
    with _waiting(name, stop) as waiter:
        while not (stop and stop.cancelled):
            waiter.clear()
            page = await in_thread(follower.step)
            if page is not None:
                yield page
            else:
                await waiter.wait_async(current().POLL_INTERVAL)


@contextmanager
def _waiting(name: str, stop: CancelToken | None) -> Iterator[engine.WakeWaiter]:
    with engine.waiter(stream_wake_group(name)) as waiter:
        unhook = stop.on_cancel(waiter.set) if stop else None
        try:
            yield waiter
        finally:
            if unhook is not None:
                unhook()
