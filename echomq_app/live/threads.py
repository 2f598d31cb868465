"""The hub's own threads for the database: few, private, and gone when idle.

`sync_to_async` has one thread for the whole process, behind every view's work; a
thousand pages that come back would queue there. Here a read waits for the hub's own
reads alone, and each thread keeps one private connection while there is work.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Callable
from queue import Empty, PriorityQueue
from typing import NamedTuple, TypeVar

from django.db import Error, connections

from ..models.private_connection import private_connection

MOST = 2
IDLE = 5.0
"""Seconds after which a thread without work closes its connection and ends."""

T = TypeVar("T")
_Job = Callable[[contextlib.ExitStack, set[str]], None]


class _Waiting(NamedTuple):
    """A job and its place in the queue."""

    patient: bool
    number: int
    job: _Job


class DatabaseThreads:
    """Runs sync database work for async code, on at most `MOST` threads."""

    def __init__(self) -> None:
        self._jobs: PriorityQueue[_Waiting] = PriorityQueue()
        self._count = itertools.count()
        self._lock = threading.Lock()
        self._threads = self._idle = 0

    async def run(self, using: str, call: Callable[[], T], *, urgent: bool = False) -> T:
        """Run `call` in one of the threads; `connections[using]` is a private one there.

        What is urgent goes before all that waits and isn't.
        """
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
        with self._lock:
            self._jobs.put(_Waiting(not urgent, next(self._count), job))
            if self._threads < MOST and self._idle < self._jobs.qsize():
                self._threads += 1
                threading.Thread(target=self._work, name="echomq-live", daemon=True).start()

    def _work(self) -> None:
        aliases: set[str] = set()
        with contextlib.ExitStack() as held:
            while (job := self._next()) is not None:
                job(held, aliases)
                del job  # a thread that waits keeps nobody's page alive

    def _next(self) -> _Job | None:
        with self._lock:
            self._idle += 1
        try:
            job: _Job | None = self._jobs.get(timeout=IDLE).job
        except Empty:
            job = None
        with self._lock:
            # Together, or a job that comes now would be left to one that has just ended.
            self._idle -= 1
            if job is None:
                job = self._last_look()
        return job

    def _last_look(self) -> _Job | None:
        try:
            return self._jobs.get_nowait().job
        except Empty:
            self._threads -= 1
            return None


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
