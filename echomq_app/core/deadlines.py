"""One thread that cancels whatever has passed its deadline.

Adding a deadline takes no lock (a signal handler may do it): it goes into a deque,
and the thread, which alone owns the heap, takes it from there. The thread is woken
only for a deadline earlier than the one it sleeps for; jobs with equal timeouts, the
usual case, never wake it.

The weak references have no callbacks. CPython 3.11 crashes when an object with several
that have one is freed and another thread drops one of them at that moment: it may
collect garbage, and so run other code, while it walks the list of them.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import threading
import time
import weakref
from _thread import TIMEOUT_MAX
from collections import deque
from queue import Empty, SimpleQueue
from typing import Protocol

logger = logging.getLogger("echomq")

_THREAD = "echomq-deadlines"
_MANY = 64  # Fewer entries than this aren't worth a sweep.


class Cancellable(Protocol):
    """What a deadline cancels."""

    def cancel(self, reason: str | None = None, kind: str = "user") -> None: ...


class Deadlines:
    """Holds what it will cancel weakly: a dropped token costs nothing but a sweep."""

    _thread: threading.Thread | None
    _starting: threading.Lock
    _bell: SimpleQueue[None]
    _wakes_at: float

    def __init__(self) -> None:
        self._number = itertools.count()
        self._heap: list[tuple[float, int, weakref.ref[Cancellable], str, str]] = []
        self._new: deque[tuple[float, int, weakref.ref[Cancellable], str, str]] = deque()
        self._sweep_at = _MANY
        self._start_afresh()
        os.register_at_fork(after_in_child=self._after_fork)

    def add(self, seconds: float, target: Cancellable, reason: str, kind: str = "deadline") -> None:
        """Cancel `target` with `reason` in `seconds` (more than 0), if it still lives."""
        at = time.monotonic() + seconds
        self._new.append((at, next(self._number), weakref.ref(target), reason, kind))
        # The thread publishes when it will wake and then looks at `_new` again, so an
        # entry is seen by the thread, or its deadline by this comparison.
        if (at < self._wakes_at or self._sweep_is_due()) and self._bell.empty():
            self._bell.put(None)
        self._ensure_thread()

    def _ensure_thread(self) -> None:
        # Whoever doesn't get the lock is overtaken by somebody who starts the thread.
        if self._thread is None and self._starting.acquire(blocking=False):
            try:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
                    thread.start()
                    self._thread = thread
            finally:
                self._starting.release()

    def _sweep_is_due(self) -> bool:
        return len(self._heap) + len(self._new) > self._sweep_at

    def _run(self) -> None:
        bell = self._bell
        while True:
            self._take_new()
            self._cancel_due()
            self._wakes_at = self._heap[0][0] if self._heap else float("inf")
            if self._new:
                continue
            sleep = min(self._wakes_at - time.monotonic(), TIMEOUT_MAX)
            if sleep > 0:
                with contextlib.suppress(Empty):
                    bell.get(timeout=sleep)
            self._wakes_at = float("-inf")

    def _take_new(self) -> None:
        while self._new:
            # Copied before it is taken away: a fork in between finds it twice, not lost.
            heapq.heappush(self._heap, self._new[0])
            self._new.popleft()
        if self._sweep_is_due():
            living = [entry for entry in self._heap if entry[2]() is not None]
            heapq.heapify(living)
            self._heap = living
            # At twice what lives now: what a sweep costs is paid for by what was added.
            self._sweep_at = max(_MANY, 2 * len(living))

    def _cancel_due(self) -> None:
        while self._heap and self._heap[0][0] <= time.monotonic():
            _, _, reference, reason, kind = heapq.heappop(self._heap)
            target = reference()
            if target is not None:
                try:
                    target.cancel(reason, kind)
                except Exception:
                    logger.exception("event=deadline_failed reason=%r", reason)

    def _start_afresh(self) -> None:
        self._thread = None
        self._starting = threading.Lock()
        self._bell = SimpleQueue()
        self._wakes_at = float("-inf")

    def _after_fork(self) -> None:
        # The thread and whoever held its lock are gone; the deadlines have been copied.
        self._start_afresh()
        if self._heap or self._new:
            self._ensure_thread()
