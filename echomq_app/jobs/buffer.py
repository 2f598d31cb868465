"""Claimed jobs that wait for a handler, and the slots in which handlers run.

Called by the main thread (`add`, `take`, `take_all`) and by the threads of the handlers
(`next`, `release`): one lock, held for a heap operation.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable

from .running import RunningJob


class Buffer:
    """At most `slots` handlers at a time; what waits goes by priority, then by time due."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._lock = threading.Lock()
        self._number = itertools.count()
        self._waiting: list[tuple[tuple[int, float], int, float, RunningJob]] = []
        self._taken = 0
        self.begun = 0
        """How many handlers have been given a slot so far."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, job: RunningJob) -> None:
        """Have a job wait."""
        claimed = job.claimed
        order = (-claimed.priority, claimed.run_after.timestamp())
        with self._lock:
            entry = (order, next(self._number), time.monotonic(), job)
            heapq.heappush(self._waiting, entry)

    def start(self) -> RunningJob | None:
        """Take a slot for the next job that waits, if there are both."""
        with self._lock:
            if self._taken >= self._slots or not self._waiting:
                return None
            self._taken += 1
            return self._pop()

    def next(self) -> RunningJob | None:
        """Use the caller's slot for the next job; give it up if there is none."""
        with self._lock:
            if self._waiting:
                return self._pop()
            self._taken -= 1
            return None

    def put_back(self, job: RunningJob) -> None:
        """Have a job wait again whose handler couldn't be started, and give up its slot."""
        self.add(job)
        with self._lock:
            self._taken -= 1
            self.begun -= 1

    def take(self, *, older_than: float) -> list[RunningJob]:
        """Take out what has waited for so many seconds."""
        before = time.monotonic() - older_than
        return self._take(lambda since: since <= before)

    def take_all(self) -> list[RunningJob]:
        """Take out all that waits."""
        return self._take(lambda since: True)

    def _pop(self) -> RunningJob:
        self.begun += 1
        return heapq.heappop(self._waiting)[-1]

    def _take(self, wanted: Callable[[float], bool]) -> list[RunningJob]:
        with self._lock:
            taken = [job for _, _, since, job in self._waiting if wanted(since)]
            self._waiting = [entry for entry in self._waiting if not wanted(entry[2])]
            heapq.heapify(self._waiting)
        return taken
