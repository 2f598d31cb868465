"""Ids that were seen lately: for handlers that must not handle a repeat.

The channel layer brings no message to a subscriber twice. A sender may: one that wasn't
sure that its first attempt got through, and tried again. Where handling can't be made
idempotent (send the state, not the change), let the sender put an id into the message
and the handler ask `Seen`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from .exceptions import InvalidArgument


class Seen:
    """Remembers at most `max_size` ids, each for `ttl` seconds (None: no limit in time).

        seen = Seen(max_size=10_000, ttl=300)
        if seen.first(message["id"]):
            apply(message)

    Repeats come close together, so a short window is enough. Safe from any thread. It is
    the memory of this process: it survives no restart.
    """

    def __init__(
        self,
        *,
        max_size: int = 10_000,
        ttl: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_size < 1:
            raise InvalidArgument(f"max_size has to be at least 1, not {max_size}.")
        if ttl is not None and not ttl > 0:
            raise InvalidArgument(f"ttl has to be above 0 seconds, or None, not {ttl}.")
        self._max_size = max_size
        self._ttl = ttl
        self._clock = clock
        self._lock = threading.Lock()
        self._at: OrderedDict[Hashable, float] = OrderedDict()

    def first(self, id: Hashable) -> bool:
        """Remember the id; tell whether it is new. A repeat doesn't prolong its time."""
        with self._lock:
            now = self._clock()
            self._drop_old(now)
            if id in self._at:
                return False
            self._at[id] = now
            if len(self._at) > self._max_size:
                self._at.popitem(last=False)
            return True

    def forget(self, id: Hashable) -> None:
        """Let the id count as new again, because handling it failed."""
        with self._lock:
            self._at.pop(id, None)

    def __contains__(self, id: Hashable) -> bool:
        with self._lock:
            self._drop_old(self._clock())
            return id in self._at

    def __len__(self) -> int:
        with self._lock:
            self._drop_old(self._clock())
            return len(self._at)

    def _drop_old(self, now: float) -> None:
        if self._ttl is None:
            return
        while self._at:
            id, at = next(iter(self._at.items()))
            if now - at < self._ttl:
                return
            del self._at[id]
