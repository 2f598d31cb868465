"""A wake-up call for one thread, which anybody may give: threads, and signal handlers.

`threading.Event` hangs when a signal handler calls `set()` in the middle of the main
thread's `wait()`; this doesn't (see `core/wakers.py`).
"""

from __future__ import annotations

from ..core.wakers import Wakers


class Wakeup:
    """Call it any number of times: the next `wait` returns at once, and takes the calls."""

    def __init__(self) -> None:
        self._called = False
        self._closed = False
        self._wakers = Wakers()
        self._enders = Wakers()

    def call(self) -> None:
        """Wake the thread."""
        self._called = True
        self._wakers.run()

    def close(self) -> None:
        """Wake the thread for good: neither `wait` nor `pause` waits any more."""
        self._closed = True
        self._enders.run()
        self.call()

    @property
    def closed(self) -> bool:
        return self._closed

    def wait(self, timeout: float | None) -> bool:
        """Wait for a call, at most `timeout` seconds; tell whether there was one."""
        called = self._wakers.wait(lambda: self._called or self._closed, timeout)
        # Before the caller looks at what there is to do: a later call isn't lost.
        self._called = False
        return called

    def pause(self, seconds: float) -> None:
        """Wait, whatever the calls, unless it is closed."""
        self._enders.wait(lambda: self._closed, seconds)
