"""Where handlers run: sync ones in threads, async ones on one loop in its own thread.

All of these threads are daemons: a handler that never ends must not keep the process
alive. The worker waits for the ones that it wants to wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger("echomq.jobs")


class ThreadPool:
    """Threads that are made when needed, up to what runs at once, and then kept.

    Kept, because a project's persistent database connections (CONN_MAX_AGE) belong to a
    thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0

    def submit(self, call: Callable[[], object]) -> None:
        """Run `call()` in a thread, now. Raises `RuntimeError` when the system gives no thread."""
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                name = f"{self._name}-{len(self._threads) + 1}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        self._calls.put(call)

    def close(self) -> None:
        """End the threads that are idle; the others end after their call."""
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException:
                logger.exception("event=call_failed thread=%s", threading.current_thread().name)
            del call
            with self._lock:
                self._idle += 1


class LoopThread:
    """One event loop in its own thread, started on first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run a coroutine as a task of its own, in a context of its own."""
        with self._lock:
            loop = self._loop or self._begin()
        loop.call_soon_threadsafe(self._start, make, context=contextvars.Context())

    def close(self, timeout: float) -> None:
        """Stop the loop, and wait `timeout` seconds for its thread."""
        self._closed = True
        if self._loop is not None and self._thread is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself in this moment
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout)

    def _begin(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system gives no thread
            loop.close()
            raise
        self._loop, self._thread = loop, thread
        return loop

    def _start(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        task = asyncio.ensure_future(make())
        # The loop holds its tasks weakly.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            while not self._closed:
                # asyncio lets SystemExit in any task, and loop.stop(), end the loop: but other
                # jobs run on it.
                try:
                    loop.run_forever()
                except BaseException:
                    logger.exception("event=loop_interrupted thread=%s", self._name)
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
