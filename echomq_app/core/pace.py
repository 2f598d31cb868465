"""How often to do what may come to cost more and more: a share of the time at most.

A look through the dead entries of an index takes as long as there are many, which is as long
as somebody's snapshot is open elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """One thing that is done again and again. One thread at a time."""

    __slots__ = ("_clock", "_next", "_share")

    def __init__(self, share: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._next = float("-inf")

    def due(self) -> bool:
        """Tell whether it may be done now."""
        return self._clock() >= self._next

    def took(self, seconds: float, *, least: float) -> None:
        """Have it rest after it was done: for `least` seconds, or longer if it took long."""
        self._next = self._clock() + max(least, seconds / self._share)

    def soon(self) -> None:
        """Have it be due."""
        self._next = float("-inf")
