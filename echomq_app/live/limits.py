"""What one socket may ask of us."""

from __future__ import annotations

import dataclasses
import time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one socket. Sizes in bytes, times in seconds."""

    frame_bytes: int = 16_384
    """The largest message of a client."""

    subscriptions: int = 100

    missing_streams: int = 10
    """Subscriptions that may wait for streams which don't exist."""

    frames_per_second: float = 50.0
    frames_at_once: int = 200
    """A client may send this many at once, and then so many a second."""

    mistakes: int = 10
    """So many bad frames end the socket."""

    login_timeout: float = 10.0
    """How long a socket that is nobody's, and reads nothing, may stay."""

    ack_timeout: float = 120.0
    """How long a full window may stay without an acknowledgement."""


class Rate:
    """A bucket of tokens: `at_once` at most, refilled `per_second`."""

    __slots__ = ("_at", "_at_once", "_left", "_per_second")

    def __init__(self, per_second: float, at_once: int) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._left = float(at_once)
        self._at = time.monotonic()

    def spend(self, count: int = 1) -> bool:
        """Take `count`; tell whether there was enough."""
        now = time.monotonic()
        self._left = min(self._at_once, self._left + (now - self._at) * self._per_second) - count
        self._at = now
        return self._left >= 0
