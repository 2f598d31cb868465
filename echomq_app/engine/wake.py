"""Wake-ups: "there is something new", from whoever commits to whoever waits.

A wake-up carries nothing and promises nothing: it makes a reader quick, and polling
makes it sure. So it may be dropped, doubled and merged as convenient. In this process it
goes straight to the waiters; to other processes it goes through the broker.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from ..conf import current
from ..core.wakers import Wakers
from .switchboard import Message

logger = logging.getLogger("echomq")

_MANY = 1024  # Groups remembered before the stale ones are thrown out.


class WakeWaiter:
    """Waits for a wake-up of its groups, in a thread or on a loop. From `engine.waiter()`.

    Clear, read, wait, in this order: a wake-up that comes after `clear()` is remembered,
    so one that comes while you read ends the wait at once, and none is lost.

        with engine.waiter(group) as waiter:
            while True:
                waiter.clear()
                if not read_and_handle():
                    waiter.wait(POLL_INTERVAL)

    Any number of threads and tasks may wait; they all wake. `set` is safe in a signal
    handler.
    """

    def __init__(
        self,
        groups: tuple[str, ...],
        enter: Callable[[WakeWaiter], object],
        leave: Callable[[WakeWaiter], object],
    ) -> None:
        self.groups = groups
        self._enter = enter
        self._leave = leave
        self._flag = False
        self._wakers = Wakers()

    def __enter__(self) -> Self:
        self._enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(self)
        self.set()  # Whoever still waits has nothing left to wait for.

    def is_set(self) -> bool:
        """Tell whether a wake-up has come since the last `clear`."""
        return self._flag

    def set(self) -> None:
        """Wake whoever waits, and whoever will before the next `clear`."""
        self._flag = True
        self._wakers.run()

    def clear(self) -> None:
        """Forget wake-ups so far. Call it before reading, not after."""
        self._flag = False

    def wait(self, timeout: float | None = None) -> bool:
        """Block until woken, at most `timeout` seconds; tell whether a wake-up came."""
        return self._wakers.wait(self.is_set, timeout)

    async def wait_async(self, timeout: float | None = None) -> bool:
        """See `wait`. Cancelling the task loses nothing."""
        return await self._wakers.wait_async(self.is_set, timeout)

    def deliver(self, message: Message) -> None:
        """Be woken by the switchboard."""
        self.set()

    def gap(self, reason: str) -> None:
        """A wake-up may have been missed: have a look."""
        self.set()


class Notifier:
    """Lets the first wake-up of a group pass at once, then one per NOTIFY_INTERVAL.

    A wake-up inside the interval is passed on when it ends, so the last one is never
    swallowed.
    """

    _next_at: dict[str, float]
    _late: set[str]

    def __init__(
        self,
        fire: Callable[[str], object],
        call_later: Callable[[float, Callable[[str], object], str], bool],
    ) -> None:
        """`call_later(delay, f, group)` runs `f(group)` later, or returns False."""
        self._fire = fire
        self._call_later = call_later
        self._start_afresh()

    def notify(self, group: str) -> None:
        """Wake those who wait for `group`, now or very soon. Never blocks or raises."""
        try:
            delay = self._admit(group)
            if delay is None:
                return
            if delay == 0 or not self._call_later(delay, self._fire_late, group):
                self._fire(group)
        except Exception:
            logger.exception("event=notify_failed group=%s", group)

    def flush(self) -> None:
        """Pass on now what waits for its interval to end."""
        for group in list(self._late):
            self._fire_late(group)

    def after_fork_in_child(self) -> None:
        """Forget what is the parent's to send."""
        self._start_afresh()

    def _admit(self, group: str) -> float | None:
        now = time.monotonic()
        with self._lock:
            next_at = self._next_at.get(group, now)
            if now >= next_at:
                self._next_at[group] = now + current().NOTIFY_INTERVAL
                if len(self._next_at) > _MANY:
                    self._next_at = {name: at for name, at in self._next_at.items() if at > now}
                return 0
            if group in self._late:
                return None
            self._late.add(group)
            return next_at - now

    def _fire_late(self, group: str) -> None:
        with self._lock:
            if group not in self._late:
                return
            self._late.discard(group)
            self._next_at[group] = time.monotonic() + current().NOTIFY_INTERVAL
        self._fire(group)

    def _start_afresh(self) -> None:
        self._lock = threading.RLock()  # A signal handler may notify too.
        self._next_at = {}
        self._late = set()
