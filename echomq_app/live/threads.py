"""The hub's own threads for the database: few, private, and gone when idle.

`sync_to_async` has one thread for the whole process, behind every view's work; a
thousand pages that come back would queue there. Here a read waits for the hub's own
reads alone, and each thread keeps one private connection while there is work.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from django.db import Error, connections

from ..models.private_connection import private_connection

MOST = 2
IDLE = 5.0
"""Seconds after which a thread without work closes its connection and ends."""

T = TypeVar("T")
_Job = Callable[[contextlib.ExitStack, set[str]], None]


class DatabaseThreads:
    """Runs sync database work for async code, on at most `MOST` threads.

    What is urgent (new records) and what isn't (replays) take turns where both wait: neither
    waits for all of the other.
    """

    def __init__(self) -> None:
        self._urgent: deque[_Job] = deque()
        self._patient: deque[_Job] = deque()
        self._was_urgent = False
        self._changed = threading.Condition()
        self._threads = self._idle = 0

    async def run(self, using: str, call: Callable[[], T], *, urgent: bool = False) -> T:
        """Run `call` in one of the threads; `connections[using]` is a private one there."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job(held: contextlib.ExitStack, aliases: set[str]) -> None:
            if future.cancelled():
                return
            try:
                if using not in aliases:
                    held.enter_context(private_connection(using, "live"))
                    aliases.add(using)
                settle = _result(future, call())
            except BaseException as error:  # noqa: BLE001  (handed to whoever waits)
                if isinstance(error, Error):
                    connections[using].close()
                settle = _error(future, error)
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits
                loop.call_soon_threadsafe(settle)

        self._submit(job, urgent=urgent)
        return await future

    def _submit(self, job: _Job, *, urgent: bool = False) -> None:
        with self._changed:
            queue = self._urgent if urgent else self._patient
            queue.append(job)
            if self._threads < MOST and self._idle < self.waiting:
                try:
                    threading.Thread(target=self._work, name="echomq-live", daemon=True).start()
                except RuntimeError:  # the system gives no thread; another one of ours does it
                    if not self._threads:
                        queue.pop()
                        raise
                else:
                    self._threads += 1
            self._changed.notify()

    @property
    def waiting(self) -> int:
        """How many jobs no thread has taken."""
        return len(self._urgent) + len(self._patient)

    def _work(self) -> None:
        aliases: set[str] = set()
        with contextlib.ExitStack() as held:
            while (job := self._next()) is not None:
                job(held, aliases)
                del job  # a thread that waits keeps nobody's page alive

    def _next(self) -> _Job | None:
        with self._changed:
            self._idle += 1
            came = self._changed.wait_for(lambda: self.waiting, IDLE)
            self._idle -= 1
            if not came:
                self._threads -= 1
                return None
            patient = bool(self._patient) and (self._was_urgent or not self._urgent)
            self._was_urgent = not patient
            return (self._patient if patient else self._urgent).popleft()


def _result(future: asyncio.Future[T], result: T) -> Callable[[], None]:
    def settle() -> None:
        if not future.done():
            future.set_result(result)

    return settle


def _error(future: asyncio.Future[T], error: BaseException) -> Callable[[], None]:
    def settle() -> None:
        if not future.done():
            future.set_exception(error)

    return settle
