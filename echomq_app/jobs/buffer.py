"""Claimed jobs that wait for a handler, and the slots in which handlers run.

A job waits, is taken to be counted (`begins.py`), and has a slot then, or gets the next one.
Called by the main thread (`add`, `take`, `take_all`), by the starter (`to_begin`, `counted`,
`put_back`) and by the threads of the handlers (`next`): one lock, held for a heap operation.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from .running import RunningJob


class Buffer:
    """At most `slots` handlers at a time; what waits goes by priority, then by time due."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._lock = threading.Lock()
        self._number = itertools.count()
        self._waiting: list[tuple[tuple[int, float], int, RunningJob]] = []
        self._counted: deque[RunningJob] = deque()
        self._taken = 0
        self.closed = False
        """Whether nothing more is given to be counted."""
        self.begun = 0
        """How many handlers have been given a slot so far."""
        self.ahead = 0
        """How many jobs may be counted beside those that have a slot."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._counted)

    @property
    def wants_more(self) -> bool:
        """Whether the starter has something to do."""
        return bool(self._waiting) and (
            self._taken < self._slots or len(self._counted) * 4 < self.ahead
        )

    def add(self, job: RunningJob) -> None:
        """Have a job wait: for a slot if its attempt has been counted, else for that."""
        if job.begun:
            with self._lock:
                self._counted.append(job)
            return
        claimed = job.claimed
        order = (-claimed.priority, claimed.run_after.timestamp())
        with self._lock:
            heapq.heappush(self._waiting, (order, next(self._number), job))

    def may_be_counted(self) -> int:
        """Return how many more jobs a claim may count: none, unless handlers begin by the hundred.

        Else it is the starter's, when a slot is there: its answer says that the worker lives.
        """
        if not self.ahead:
            return 0
        with self._lock:
            waiting = len(self._counted) + len(self._waiting)
            return max(0, self._slots + self.ahead - self._taken - waiting)

    def to_begin(self) -> list[RunningJob]:
        """Take the jobs to be counted now: those that get a slot, and the next few.

        The first that must have its slot before it is counted ends the few.
        """
        with self._lock:
            jobs: list[RunningJob] = []
            if self.closed:
                return jobs
            free = self._slots - self._taken - len(self._counted)
            while self._waiting and len(jobs) < free + self.ahead:
                if len(jobs) >= free and not self._waiting[0][-1].may_be_counted_ahead:
                    break
                jobs.append(heapq.heappop(self._waiting)[-1])
            return jobs

    def counted(self, jobs: Iterable[RunningJob]) -> list[RunningJob]:
        """Take jobs that have been counted; return those that have a slot now."""
        with self._lock:
            self._counted += jobs
            if self.closed:
                return []
            number = min(self._slots - self._taken, len(self._counted))
            self._taken += number
            return [self._pop() for _ in range(number)]

    def next(self) -> RunningJob | None:
        """Use the caller's slot for the next job that is counted; give it up if there is none."""
        with self._lock:
            if self._counted and not self.closed:
                return self._pop()
            self._taken -= 1
            return None

    def put_back(self, jobs: Iterable[RunningJob]) -> None:
        """Have jobs wait again that couldn't be counted."""
        for job in jobs:
            self.add(job)

    def give_up_slot(self) -> None:
        """Take back the slot of a job whose handler couldn't be started."""
        with self._lock:
            self._taken -= 1
            self.begun -= 1

    def close(self) -> None:
        """Give nothing more to be counted."""
        with self._lock:
            self.closed = True

    def take(self, *, older_than: float) -> list[RunningJob]:
        """Take out what has waited for so many seconds."""
        before = time.monotonic() - older_than
        return self._take(lambda since: since <= before)

    def take_all(self) -> list[RunningJob]:
        """Take out all that waits."""
        return self._take(lambda since: True)

    def _pop(self) -> RunningJob:
        self.begun += 1
        return self._counted.popleft()

    def _take(self, wanted: Callable[[float], bool]) -> list[RunningJob]:
        with self._lock:
            taken = [job for *_, job in self._waiting if wanted(job.since)]
            taken += [job for job in self._counted if wanted(job.since)]
            self._waiting = [entry for entry in self._waiting if not wanted(entry[-1].since)]
            heapq.heapify(self._waiting)
            self._counted = deque(job for job in self._counted if not wanted(job.since))
        return taken
