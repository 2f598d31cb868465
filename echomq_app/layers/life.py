"""What belongs to one life of a node in this process, and when what it wrote goes out.

A life begins with the station, and again in the child after a fork and after a goodbye. All
of it is replaced at once, so nobody ever sees half of the one and half of the other.
"""

from __future__ import annotations

import concurrent.futures
import secrets
import threading
import time
from typing import Literal

from ..core.echo.node import EchoNode
from .clock import PatientClock
from .local import LocalChannels
from .options import LayerOptions
from .reports import Reports


class Pace:
    """When to flush: at once after a pause, then every `interval` seconds, or a whole frame.

    Its owner holds a lock around every call.
    """

    def __init__(self, interval: float, max_batch: int) -> None:
        self._interval = interval
        self._max_batch = max_batch
        self._unflushed = 0
        self._waits = self._hurries = False
        self._flushed_at = float("-inf")

    def wrote(self) -> Literal["", "plan", "flush"]:
        """Count one more message; return what has to be called for, if anything."""
        self._unflushed += 1
        if self._waits and (self._hurries or self._unflushed < self._max_batch):
            return ""
        if self._waits:  # a whole frame waits already
            self._hurries = True
            return "flush"
        self._waits = True
        return "plan"

    def due(self) -> float:
        """Return the earliest time of the next flush, by the loop's clock."""
        return self._flushed_at + self._interval

    def flushes(self, now: float) -> int:
        """Note that all goes out now; return how many messages that are."""
        self.calls_are_lost()
        count, self._unflushed = self._unflushed, 0
        if count:
            self._flushed_at = now
        return count

    def calls_are_lost(self) -> None:
        """Whatever was called for won't happen: call again."""
        self._waits = self._hurries = False


class Life:
    """A boot of the node, with its channels. `lock` guards the node and the pace."""

    def __init__(self, options: LayerOptions, tick: float) -> None:
        """`tick`: seconds between two ticks of its clock."""
        name = options.node_name()
        began = time.monotonic()
        self.lock = threading.RLock()
        self.local = LocalChannels(name, options.capacity or options.buffer_size, self.lock)
        self.clock = PatientClock(tick)
        self.node = EchoNode(
            name,
            secrets.token_hex(8),
            options.rules(),
            self.clock.now(),
            age=lambda: time.monotonic() - began,
        )
        self.pace = Pace(options.batch_interval, options.max_batch)
        self.reports = Reports(options, name)
        self.joined: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done when the other nodes should know of us."""

    def set_joined(self) -> None:
        """Let those go on who waited for it. On the engine's loop."""
        if not self.joined.done():
            self.joined.set_result(None)

    def wrote(self) -> bool:
        """Tell whether anything was ever sent."""
        with self.lock:
            return any(self.node.sending.cursors())
