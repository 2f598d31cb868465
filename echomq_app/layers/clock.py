"""A monotonic clock that hardly runs while this process doesn't.

A process that was stopped, or whose threads couldn't get the interpreter, must not find
that everybody else was silent: it was deaf. So between two ticks the clock moves on by
no more than a few intervals, and a timeout counts only while the ticks come on time.
"""

from __future__ import annotations

import time

_LATE = 3.0
"""Intervals that may pass between two ticks."""


class PatientClock:
    """Seconds since some start. `tick()` has to be called every `interval` seconds."""

    def __init__(self, interval: float) -> None:
        self._longest = _LATE * interval
        self._passed = 0.0
        self._last = time.monotonic()

    def now(self) -> float:
        """Return the time; safe from any thread."""
        return self._passed + min(time.monotonic() - self._last, self._longest)

    def tick(self) -> float:
        """Go on, and return the time. From one thread only."""
        now = self.now()
        self._last = time.monotonic()
        self._passed = now
        return now
