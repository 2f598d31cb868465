"""The node of this process, as the rest of the process sees it: safe from any thread.

Writing happens in the caller's thread, under a lock that is held for microseconds:
into the ring, and into the channels of this process. Everything else (links, timers,
batches, acks) lives on the engine's loop, so a caller never waits for it, and neither
does anybody wait for a caller's loop.

A process has one station per configuration, whatever number of layer objects there are.
A fork gets a new life of its own: another boot, an empty ring, no channels.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from .. import engine
from ..core.echo.node import EchoNode
from ..exceptions import EngineStopped
from .driver import Driver
from .life import Life
from .line import LineDown
from .links import Links
from .local import LocalChannels
from .options import LayerOptions

logger = logging.getLogger("echomq")

JOIN_TIMEOUT = 5.0
"""Seconds after which a node goes on without having been introduced: no link, so far."""
STOP_TIMEOUT = 1.5
"""Seconds that the links may take to close."""


class Station:
    """One node of this process, and the run of it on the engine's loop."""

    def __init__(self, options: LayerOptions) -> None:
        self.options = options
        self._transport = options.transport_settings()
        self._tick = min(0.1, options.retry_interval / 2, options.heartbeat_interval / 4)
        self.begin()

    def begin(self) -> None:
        """Begin a life: at the start, in the child after a fork, and after a goodbye."""
        self._life = Life(self.options, self._tick)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: concurrent.futures.Future[None] | None = None
        self._run_task: asyncio.Task[Any] | None = None
        self._driver: Driver | None = None

    @property
    def node(self) -> EchoNode:
        """The protocol's state in this life."""
        return self._life.node

    @property
    def local(self) -> LocalChannels:
        """The channels of this life."""
        return self._life.local

    @property
    def links(self) -> Links:
        """The links of the present run; `LineDown` if there is none."""
        return self._begun().links

    @property
    def has_transport(self) -> bool:
        """Whether messages leave the node."""
        return self._transport is not None

    def belongings(self) -> list[object]:
        """Return what must not be finalised in a forked child: it is the parent's."""
        return [self._loop, self._running, self._run_task, self._driver]

    def publish(self, group: str, payload: bytes, index: int) -> None:
        """Write a message: to the channels here at once, to the other nodes soon."""
        record = (group, payload)
        life = self._life
        if self._transport is None:
            life.local.deliver((record,))
            return
        with life.lock:
            life.node.write(index, record)
            life.local.deliver((record,))
            what = life.pace.wrote()
        if what:
            self._call_for(what)

    def start(self) -> None:
        """Connect, if that isn't done yet. Doesn't wait."""
        if self._transport is None or self._running is not None:
            return
        with self._life.lock:
            if self._running is None:
                self._running = engine.submit(self._run)
                self._running.add_done_callback(self._ended)

    async def joined(self) -> None:
        """Wait until the other nodes know us, at most JOIN_TIMEOUT, once per process."""
        if self._transport is None or self._life.joined.done():
            return
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_TIMEOUT):
                await asyncio.shield(asyncio.wrap_future(self._life.joined))

    async def on_engine(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine on the engine's loop and return its result."""
        self.start()
        return await asyncio.wrap_future(engine.submit(make))

    def drain(self, timeout: float) -> bool:
        """Wait until every node has all that was written, at most `timeout` seconds."""
        return not self._life.wrote() or self._wait_for(lambda: self._drain(timeout), timeout)

    def leave(self, timeout: float) -> None:
        """Drain, say goodbye and disconnect. What comes after begins another life."""
        if self._running is not None:
            self._wait_for(lambda: self._leave(timeout), timeout + 2.0)
            self.begin()

    # Plain sends, which pass through. On the engine's loop.

    async def send_to_node(self, boot: str, channel: str, payload: bytes) -> None:
        """Send to a channel of another node: at most once. Unknown node: nobody's channel."""
        await self._begun().send_to_node(boot, channel, payload)

    async def send_through(self, channel: str, message: dict[str, Any]) -> None:
        """Send to a channel that isn't a node's own, as the transport does."""
        await self.links.send_through(channel, message)

    async def receive_through(self, channel: str) -> dict[str, Any]:
        """Receive from such a channel. Cancelled, the receive goes on for the next caller."""
        return await self.links.receive_through(channel)

    # Details.

    def _call_for(self, what: str) -> None:
        """Have it flushed on the engine's loop, which starts if need be."""
        loop, driver = self._loop, self._driver
        if loop is None or driver is None:
            self.start()  # It flushes when it has started.
            return
        with contextlib.suppress(RuntimeError):  # It has just been closed.
            loop.call_soon_threadsafe(driver.plan_flush if what == "plan" else driver.flush)

    def _wait_for(self, make: Callable[[], Coroutine[Any, Any, bool]], timeout: float) -> bool:
        if self._transport is None:
            return True
        self.start()
        future = engine.submit(make)
        try:
            return bool(future.result(timeout + 0.5))
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError, EngineStopped):
            future.cancel()
            return False

    async def _run(self) -> None:
        life, loop = self._life, asyncio.get_running_loop()
        driver = Driver(life, self.options, self._transport or {}, tick=self._tick)
        self._run_task = asyncio.current_task()
        with life.lock:
            self._driver, self._loop = driver, loop
            life.clock.tick()
        loop.call_later(JOIN_TIMEOUT, life.set_joined)
        await driver.run()

    def _ended(self, future: concurrent.futures.Future[None]) -> None:
        with self._life.lock:
            if self._running is future:
                self._running = self._loop = self._driver = None
                self._life.pace.calls_are_lost()
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, EngineStopped):
            logger.error("event=layer_failed error=%r", error)

    def _begun(self) -> Driver:
        """Return the driver; `_run` was submitted before whoever asks, so it is there."""
        if self._driver is None:
            raise LineDown
        return self._driver

    async def _drain(self, timeout: float) -> bool:
        return self._driver is not None and await self._driver.drain(timeout)

    async def _leave(self, timeout: float) -> bool:
        done = not self._life.wrote() or await self._drain(timeout)
        if self._driver is not None:
            await self._driver.say_goodbye()
        if self._run_task is not None:
            self._run_task.cancel()
            await asyncio.wait([self._run_task], timeout=STOP_TIMEOUT)
        return done
