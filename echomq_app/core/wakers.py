"""Callbacks that each run exactly once, and waiting for them, without any lock.

A token may be cancelled, and a waiter woken, from a signal handler: it runs in the
middle of whatever the main thread is doing, also in the middle of this module. A
lock taken here could be the very lock that the interrupted code holds, and the
process would hang for good (`threading.Event` has that fault: `set()` in a handler
that interrupts `wait()`). So there is none. Two rules replace it:

- Callbacks live in a dict. `dict.pop` and `dict.popitem` are atomic, so whoever gets
  the callback out of the dict, and nobody else, runs it.
- The waker first sets its flag, then empties the dict; the waiter first adds to the
  dict, then looks at the flag. Whatever the interleaving, one of them sees the other.

A thread waits on a raw lock that belongs to it alone, a task on a future of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from _thread import TIMEOUT_MAX, allocate_lock
from collections.abc import Callable

logger = logging.getLogger("echomq")


class Wakers:
    """One-shot callbacks. Safe from any thread, task, signal handler or finaliser."""

    __slots__ = ("_callbacks",)

    def __init__(self) -> None:
        self._callbacks: dict[object, Callable[[], object]] = {}

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, callback: Callable[[], object]) -> object:
        """Keep `callback` for the next `run`; return the handle for the other verbs.

        The caller looks at its flag after this, and calls `run_one` if it is set.
        """
        handle = object()
        self._callbacks[handle] = callback
        return handle

    def discard(self, handle: object) -> None:
        """Forget a callback; one that is running in another thread runs on."""
        self._callbacks.pop(handle, None)

    def run_one(self, handle: object) -> None:
        """Run this callback here, unless it has run or been discarded."""
        callback = self._callbacks.pop(handle, None)
        if callback is not None:
            _call(callback)

    def run(self) -> None:
        """Run what is there and what is added meanwhile, the newest first."""
        while True:
            try:
                _, callback = self._callbacks.popitem()
            except KeyError:
                return
            _call(callback)

    def wait(self, is_set: Callable[[], bool], timeout: float | None) -> bool:
        """Block this thread until `run` or `timeout` (seconds); return `is_set()`.

        Signal handlers run while it waits, and may be the ones that wake it.
        """
        if is_set() or (timeout is not None and timeout <= 0):
            return is_set()
        gate = allocate_lock()
        gate.acquire()
        handle = self.add(gate.release)
        try:
            if not is_set():
                gate.acquire(timeout=-1 if timeout is None else min(timeout, TIMEOUT_MAX))
        finally:
            self.discard(handle)
        return is_set()

    async def wait_async(self, is_set: Callable[[], bool], timeout: float | None) -> bool:
        """Suspend this task until `run` or `timeout` (seconds); return `is_set()`."""
        if is_set() or (timeout is not None and timeout <= 0):
            return is_set()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        handle = self.add(lambda: _settle_from_anywhere(loop, future))
        timer = None if timeout is None else loop.call_later(timeout, _settle, future)
        try:
            if not is_set():
                await future
        finally:
            self.discard(handle)
            if timer is not None:
                timer.cancel()
        return is_set()


def _call(callback: Callable[[], object]) -> None:
    try:
        callback()
    except Exception:
        logger.exception("event=callback_failed callback=%r", callback)


def _settle_from_anywhere(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    with contextlib.suppress(RuntimeError):  # closed, so nobody waits on it any more
        loop.call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
