"""How many jobs a worker claims ahead of its handlers: as many as it gets through in a moment.

Claimed one by one, short jobs would wait for the database between each other. Claimed by the
hundred, long ones would sit in one worker while others are idle, and a job of higher priority
would come too late. So what is claimed ahead is measured in time: what the handlers begin in
`HOLD` seconds, at the rate of the last claims.
"""

from __future__ import annotations

HOLD = 0.2
"""Seconds that a job may wait in the worker for a handler, about."""
STALE = 1.0
"""Seconds after which it is given back: handlers have become slower than they were."""
MOST = 500
_SHORTEST = 0.01  # Between two claims that follow each other at once, a rate is chance.

COUNTED_AHEAD = 0.04
"""Seconds: the handlers that begin in this time may be counted in one statement before."""


class Prefetch:
    """The rate at which handlers begin, and what follows from it. Times in seconds."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._mean_rate = 0.0
        self._begun = 0
        self._at: float | None = None

    def ahead(self, begun: int, now: float) -> int:
        """Return how many jobs may wait beside those that run.

        `begun`: how many handlers have begun so far, at the time `now`.
        """
        if self._at is None:
            self._at, self._begun = now, begun
        elapsed = now - self._at
        if elapsed >= _SHORTEST:
            rate = (begun - self._begun) / elapsed
            # Down at once, up by halves: to hold too few costs little.
            self._rate = rate if rate < self._rate else (self._rate + rate) / 2
            self._mean_rate += (rate - self._mean_rate) * min(1.0, elapsed / HOLD)
            self._at, self._begun = now, begun
        return min(MOST, int(self._rate * HOLD))

    def counted_ahead(self) -> int:
        """Return how many jobs may be counted as begun before they have a slot.

        By the mean rate: one slow moment would make the next statements small.
        """
        return int(self._mean_rate * COUNTED_AHEAD)

    def forget(self) -> None:
        """Begin anew, with nothing ahead: jobs had to be given back."""
        self._rate, self._mean_rate, self._at = 0.0, 0.0, None
