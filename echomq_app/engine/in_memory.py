"""Sending on Channels' in-memory layer, whose queues belong to the receivers' loop.

`InMemoryChannelLayer` is a dict of `asyncio.Queue`s in one object. A put from another
thread or loop doesn't wake the consumer that waits in `get()`, so a send has to run on
the loop of the receivers, and on the very instance that they use. Which loop that is:

1. the loop that was bound with `engine.bind_loop()`, which the consumers of this app do
   when they connect, as long as it runs;
2. the loop that runs in the calling thread: async code next to the consumers;
3. under ASGI, the server's loop that a sync view or `sync_to_async` runs below, which
   asgiref remembers in the thread.

Where there is none of the three (a thread of its own, in a process in which nothing was
bound) the message is lost, with the reason in the log: there is no safe way to deliver.
Feeds and wake-ups of this app need none of this; they never go through the queues.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from typing import Any

from asgiref.sync import SyncToAsync
from channels.layers import InMemoryChannelLayer

logger = logging.getLogger("echomq")

_bound: weakref.ref[asyncio.AbstractEventLoop] | None = None
_sends: set[asyncio.Task[None]] = set()  # The loop itself holds tasks weakly.


class NoReceiverLoop(Exception):
    """Nothing says on which event loop the in-memory layer's consumers run."""

    def __init__(self) -> None:
        super().__init__(
            "The in-memory channel layer delivers only on its consumers' event loop, and this "
            "thread knows none. Call engine.bind_loop() in an async function of that loop, or "
            "use a channel layer with a broker."
        )


def bind_loop() -> None:
    """Say that the in-memory layer's consumers run on the running loop."""
    global _bound  # noqa: PLW0603  (one per process is the point)
    _bound = weakref.ref(asyncio.get_running_loop())


def post(layer: InMemoryChannelLayer, group: str, message: dict[str, Any]) -> int:
    """Send to the consumers in `group` from any thread; return how many there are.

    Doesn't wait. Raises `NoReceiverLoop` when there are some and their loop is unknown.
    """
    receivers = len(layer.groups.get(group, ()))
    if receivers:
        loop = _receivers_loop()
        if loop is None:
            raise NoReceiverLoop
        loop.call_soon_threadsafe(_start_send, layer, group, message)
    return receivers


def _receivers_loop() -> asyncio.AbstractEventLoop | None:
    loop = _bound() if _bound is not None else None
    if loop is not None and loop.is_running():
        return loop
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    local = SyncToAsync.threadlocal
    if getattr(local, "main_event_loop_pid", None) == os.getpid():
        main: asyncio.AbstractEventLoop | None = getattr(local, "main_event_loop", None)
        if main is not None and main.is_running():
            return main
    return None


def after_fork_in_child() -> None:
    """Forget the parent's loop, which looks as if it ran here."""
    global _bound  # noqa: PLW0603
    _bound = None
    _sends.clear()


def _start_send(layer: InMemoryChannelLayer, group: str, message: dict[str, Any]) -> None:
    task = asyncio.get_running_loop().create_task(layer.group_send(group, message))
    _sends.add(task)
    task.add_done_callback(_sent)


def _sent(task: asyncio.Task[None]) -> None:
    _sends.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("event=publish_failed layer=in_memory error=%r", error)
