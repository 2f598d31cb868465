"""Wake-ups: "there is something new", from whoever commits to whoever waits.

A wake-up carries nothing and promises nothing: it makes a reader quick, and polling
makes it sure. So it may be dropped, doubled and merged as convenient. In this process it
goes straight to the waiters; to other processes it goes through the broker.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from ..conf import current
from ..core.wakers import Wakers
from .switchboard import Message

JITTER = 0.25
"""The part of NOTIFY_INTERVAL by which a pause may be longer."""
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
    _late: dict[str, float]

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
        """Wake those who wait for `group`, now or when the interval ends."""
        delay = self._admit(group)
        if delay == 0 or (
            delay is not None and not self._call_later(delay, self._fire_late, group)
        ):
            self._fire(group)

    def flush(self) -> None:
        """Pass on now what waits for its interval to end."""
        for group in list(self._late):
            self._fire_late(group, hurry=True)

    def forget(self) -> None:
        """Forget what waits and what passed: a new life begins."""
        self._start_afresh()

    def _admit(self, group: str) -> float | None:
        """Return 0 to fire now, the delay to fire later, or None: it is on its way."""
        now = time.monotonic()
        with self._lock:
            due = self._next_at.get(group, now)
            if now >= due:
                self._late.pop(group, None)  # its timer is late itself; this is it
                self._passed(group, now)
                return 0
            if group in self._late:
                return None
            self._late[group] = due
            return due - now

    def _fire_late(self, group: str, *, hurry: bool = False) -> None:
        now = time.monotonic()
        with self._lock:
            # A timer may find that its wake-up has passed and that a later one waits,
            # which has a timer of its own. The loop's clock is coarser than ours.
            due = self._late.get(group)
            if due is None or (now < due - 0.001 and not hurry):
                return
            del self._late[group]
            self._passed(group, now)
        self._fire(group)

    def _passed(self, group: str, now: float) -> None:
        # Not to the beat: many processes would wake the same readers all at once, each time.
        jitter = JITTER * random.random()  # noqa: S311
        self._next_at[group] = now + current().NOTIFY_INTERVAL * (1 + jitter)
        if len(self._next_at) > _MANY:
            self._next_at = {name: at for name, at in self._next_at.items() if at > now}

    def _start_afresh(self) -> None:
        self._lock = threading.RLock()  # A signal handler may notify too.
        self._next_at = {}
        self._late = {}
