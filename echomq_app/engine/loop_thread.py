"""A daemon thread with one event loop, which a fork and an exit leave in good order.

**Fork.** The child has no such thread, only a copy of its memory. It must not touch the
old loop: the epoll set is shared with the parent, so unregistering a socket in the child
would make the parent deaf, and closing a TLS stream would say goodbye in the parent's
name. So the child first puts /dev/null in the place of every descriptor of the old loop
(which closes the child's copies of the parent's connections and renders anything that a
finaliser may do later harmless), and then keeps it, unfinalised, for good. Its own
thread starts on first use.

**Exit.** `stop` ends the tasks, lets the owner close its connections, and joins the
thread, all within a deadline; what hangs is left to the daemon thread's fate.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import selectors
import threading
from collections.abc import Awaitable, Callable

logger = logging.getLogger("echomq")

CLOSING_TIMEOUT = 1.5
"""How long the owner may take to close its connections when the loop stops."""

_graveyard: list[object] = []


class LoopThread:
    """Starts on first use. All methods are safe from any thread and never wait for I/O."""

    _lock: threading.RLock
    _starting: bool
    _loop: asyncio.AbstractEventLoop | None
    _selector: selectors.BaseSelector | None
    _thread: threading.Thread | None

    def __init__(
        self,
        name: str,
        *,
        on_start: Callable[[], object],
        on_stop: Callable[[], Awaitable[object]],
    ) -> None:
        self._name = name
        self._on_start = on_start
        self._on_stop = on_stop
        self._closed = False
        self._start_afresh()

    @property
    def running(self) -> bool:
        """Whether there is a loop that takes calls."""
        return self._loop is not None

    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the loop, started if need be; None if none can run any more."""
        return self._loop or self._ensure_loop()

    def call(self, function: Callable[..., object], *args: object) -> bool:
        """Run `function(*args)` on the loop soon; False if no loop can run any more."""
        loop = self.loop()
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # closed in this very moment
            return False
        return True

    def is_current(self) -> bool:
        """Tell whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def stop(self, timeout: float) -> bool:
        """End the loop and its thread; a later call starts it again. Tell whether it ended."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._selector = self._thread = None
        if loop is None or thread is None:
            return True
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(timeout)
        return not thread.is_alive()

    def close(self, timeout: float) -> bool:
        """Stop for good: no call starts it again."""
        self._closed = True
        return self.stop(timeout)

    def after_fork_in_child(self, *belongings: object) -> None:
        """Forget the parent's loop, closing this process's copies of its descriptors.

        `belongings`: what else of the parent must never be finalised here.
        """
        loop, selector = self._loop, self._selector
        self._start_afresh()
        self._closed = False
        if selector is not None:
            _hollow_out(selector)
            bury([loop, *belongings])

    def _ensure_loop(self) -> asyncio.AbstractEventLoop | None:
        with self._lock:
            # The lock is taken again by a signal handler that interrupts the start below.
            if self._loop is not None or self._closed or self._starting:
                return self._loop
            self._starting = True
            try:
                self._start()
            finally:
                self._starting = False
            return self._loop

    def _start(self) -> None:
        selector = selectors.DefaultSelector()
        loop = asyncio.SelectorEventLoop(selector)
        thread = threading.Thread(target=self._run, args=(loop,), name=self._name, daemon=True)
        loop.call_soon(self._on_start)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            loop.close()
        else:
            self._loop, self._selector, self._thread = loop, selector, thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
        finally:
            with self._lock:
                if self._loop is loop:
                    self._loop = self._selector = self._thread = None
            _finish(loop, self._on_stop)
            asyncio.set_event_loop(None)

    def _start_afresh(self) -> None:
        self._lock = threading.RLock()
        self._starting = False
        self._loop = self._selector = self._thread = None


def _finish(loop: asyncio.AbstractEventLoop, on_stop: Callable[[], Awaitable[object]]) -> None:
    async def finish() -> None:
        try:
            async with asyncio.timeout(CLOSING_TIMEOUT):
                await on_stop()
        except Exception as error:  # noqa: BLE001  (the thread ends either way)
            logger.debug("event=engine_close_failed error=%r", error)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        if rest:
            await asyncio.wait(rest, timeout=CLOSING_TIMEOUT)
        await loop.shutdown_asyncgens()

    try:
        loop.run_until_complete(finish())
    finally:
        loop.close()


def bury(remains: list[object]) -> None:
    """Keep objects of the parent from being finalised, also at the interpreter's end.

    There, pending tasks are reported on stderr and suspended coroutines run their
    `finally` blocks, for a loop that never existed in this process. CPython doesn't free
    what the stack of a thread that is gone refers to, which covers most of it by accident.
    """
    _graveyard.append(remains)
    with contextlib.suppress(ImportError, AttributeError):
        import ctypes

        ctypes.pythonapi.Py_IncRef(ctypes.py_object(remains))


def _hollow_out(selector: selectors.BaseSelector) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    try:
        descriptors = [key.fd for key in list(selector.get_map().values())]
        with contextlib.suppress(AttributeError):  # select() and poll() have none
            descriptors.append(selector.fileno())  # type: ignore[attr-defined]
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # kqueue's isn't inherited at all
                os.dup2(null, descriptor, inheritable=False)
    finally:
        os.close(null)
