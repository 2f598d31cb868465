"""What goes to a socket: the one task that sends to it, and that closes it.

Nobody else sends. So a socket that takes nothing blocks nobody, and nothing is sent out of turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from ..core import frames
from ..core.frames import Close, ServerFrame

LAST_WORDS = 5.0
"""Seconds for the reason of a close to be sent: the client may not be reading."""
UNSENT = 1_000
"""Answers that wait for a client who asks and doesn't read."""

Run = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
Source = Callable[[], ServerFrame | None]
"""Returns a frame that may be sent now; None if there is none."""


class Sink(Protocol):
    """What is written to."""

    async def send_text(self, text: str) -> None: ...
    async def close_with(self, code: int) -> None: ...


class Writer:
    """Answers first, then a frame of each source in turn."""

    def __init__(self, sink: Sink, sources: Callable[[], Iterable[Source]], run: Run) -> None:
        """`run` starts a task, and sees to it that somebody hears when it fails."""
        self._sink = sink
        self._sources = sources
        self._run = run
        self._answers: deque[ServerFrame] = deque()
        self._news = asyncio.Event()
        self.closing: int | None = None
        """The code with which it is closed, as soon as that has been asked for."""
        self.sending_since: float | None = None
        """`time.monotonic()` of the send that hasn't ended."""

    def start(self) -> None:
        """Begin to write."""
        self._task = self._run(self._write())

    def wake(self) -> None:
        """Ask the sources: one may have something."""
        self._news.set()

    def tell(self, frame: ServerFrame) -> None:
        """Send what no window holds back."""
        self._answers.append(frame)
        self._news.set()
        if len(self._answers) > UNSENT:
            self.close(Close.TOO_FAST)

    def close(self, code: int) -> None:
        """Close when what has been told is sent, but soon. The first code counts."""
        if self.closing is None:
            self.closing = code
            self._run(self._insist(code))

    def is_gone(self) -> None:
        """Know that the socket is there no more: what fails from now on fails in vain."""
        self.closing = self.closing or Close.FAILED

    async def _write(self) -> None:
        with contextlib.suppress(OSError):  # gone; the socket's end comes by itself
            while True:
                await self._news.wait()
                self._news.clear()
                await self._send_all()
                if self.closing is not None:
                    await self._sink.close_with(self.closing)
                    return

    async def _send_all(self) -> None:
        busy = True
        while busy and await self._send_answers():
            busy = False
            for source in self._sources():
                # Each time: a subscription that has just opened may have records already.
                if not await self._send_answers():
                    return
                if (frame := source()) is not None:
                    busy = True
                    await self._send(frame)
            if busy:
                await asyncio.sleep(0)  # no send need have waited, and others wait too

    async def _send_answers(self) -> bool:
        """Send what was told; say whether anything may follow."""
        while self._answers:
            await self._send(self._answers.popleft())
        return self.closing is None

    async def _send(self, frame: ServerFrame) -> None:
        self.sending_since = time.monotonic()
        await self._sink.send_text(frames.encode(frame))
        self.sending_since = None

    async def _insist(self, code: int) -> None:
        await asyncio.wait([self._task], timeout=LAST_WORDS)
        if self._task.cancel():
            await asyncio.wait([self._task])
            with contextlib.suppress(OSError):
                await self._sink.close_with(code)
