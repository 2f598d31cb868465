"""What the signals mean that ask a process to stop, when they come more than once.

A stop is one stop, however often it is asked for. systemd and Heroku signal every process of a
service, and a supervisor passes on to its workers what they have got already; a shell in a
container, or a runner in the terminal, repeats it. To end at once, without tidying up, is what a
person asks for who presses Ctrl-C again because it takes too long, or SIGQUIT by its nature.
"""

from __future__ import annotations

import enum
import signal

AGAIN = 1.0
"""Seconds after the first Ctrl-C from which the next one is a person's, and no echo of it."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)


class Order(enum.Enum):
    """What to do."""

    STOP = enum.auto()
    """Stop gracefully."""
    NOTHING = enum.auto()
    """It is stopping already."""
    END = enum.auto()
    """End at once."""


class StopSignals:
    """Those that one process has received. Times in seconds, monotonic."""

    def __init__(self) -> None:
        self.stopping = False
        self._interrupted: float | None = None

    def received(self, number: int, at: float) -> Order:
        """Return what the signal `number` at the time `at` means."""
        if number == signal.SIGQUIT:
            self.stopping = True
            return Order.END
        if number == signal.SIGINT:
            if self._interrupted is not None and at - self._interrupted >= AGAIN:
                return Order.END
            if self._interrupted is None:
                self._interrupted = at
        if self.stopping:
            return Order.NOTHING
        self.stopping = True
        return Order.STOP
