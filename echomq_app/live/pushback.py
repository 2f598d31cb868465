"""Wait for a client that reads slowly, also under a server whose `send` doesn't.

uvicorn's `send` waits while much is on its way. daphne's takes whatever it gets into memory,
at once. But daphne answers with Twisted's `http.Request`, and that tells a producer when to
pause: 64 kB are unsent, and when to go on. Seen only where `send` is daphne's own: behind a
middleware that wraps it, a slow client's stream grows in daphne's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any


class Pushback:
    """A producer in Twisted's meaning. `wait` returns when the client can take more."""

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._ready.set()

    async def wait(self) -> None:
        """Wait until there is room, or nobody is there to need it."""
        await self._ready.wait()

    # Twisted's names
    def pauseProducing(self) -> None:  # noqa: N802
        self._ready.clear()

    def resumeProducing(self) -> None:  # noqa: N802
        self._ready.set()

    def stopProducing(self) -> None:  # noqa: N802
        self._ready.set()


@contextlib.contextmanager
def pushback_of(send: Any) -> Iterator[Pushback]:
    """Give what to wait for after each `send` while the block runs."""
    pushback = Pushback()
    request = _twisted_request(send)
    if request is None:
        yield pushback
        return
    request.registerProducer(pushback, True)
    try:
        yield pushback
    finally:
        if request.channel is not None:  # still connected
            request.unregisterProducer()


def _twisted_request(send: Any) -> Any:
    """Return the request that daphne's `send` answers; `None` under another server."""
    http = sys.modules.get("twisted.web.http")
    if http is None or not isinstance(send, partial):
        return None
    found = [argument for argument in send.args if isinstance(argument, http.Request)]
    return found[0] if found else None
