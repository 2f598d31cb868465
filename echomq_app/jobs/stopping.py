"""Signals that stop a worker, or the supervisor of several: received in one place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..core.stop_signals import STOP_SIGNALS, Order, StopSignals


@contextmanager
def stop_signals(
    stop: Callable[[], object], end: Callable[[int], object] | None = None
) -> Iterator[None]:
    """Call `stop()` on the first signal to stop, and `end(number)` on one that ends at once.

    Without `end`, this process ends by that signal. In the main thread only; elsewhere nothing
    is received. What was set before is given back, unless the process was asked to stop: then
    SIGTERM and SIGINT are ignored from there on, or a late repetition would end it by a signal
    when everything is tidied up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    rule = StopSignals()

    def receive(number: int, frame: FrameType | None) -> None:
        order = rule.received(number, time.monotonic())
        if order is Order.STOP:
            stop()
        elif order is Order.END:
            (end or _end_by)(number)

    previous = {number: signal.signal(number, receive) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            ignored = rule.stopping and number != signal.SIGQUIT
            signal.signal(number, signal.SIG_IGN if ignored else handler)


def _end_by(number: int) -> None:
    """End this process: no grace. The lease runs out, and other workers take the jobs."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
