"""A node at work: the protocol of `core.echo`, driven from the engine's loop.

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
import secrets
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from .. import engine
from ..core.echo import frames
from ..core.echo.effects import Broadcast, Deliver, Effect, Happened, Notify, Send, SendBatch
from ..core.echo.node import EchoNode
from ..core.echo.peers import QUIET_BEATS
from ..exceptions import EngineStopped
from .clock import PatientClock
from .line import LineDown
from .links import Links
from .local import LocalChannels
from .options import LayerOptions
from .reports import Reports

logger = logging.getLogger("echomq")

JOIN_GRACE = 0.2
"""Seconds after our own hello came back in which the others' answers come."""
JOIN_TIMEOUT = 5.0
"""Seconds after which a node goes on without having been introduced: no link, so far."""
LOG_INTERVAL = 10.0


class Station:
    """One node of this process. All public methods are safe from any thread."""

    lock: threading.RLock
    local: LocalChannels
    node: EchoNode
    _joined: concurrent.futures.Future[None]
    _loop: asyncio.AbstractEventLoop | None

    def __init__(self, options: LayerOptions) -> None:
        self.options = options
        self._transport = options.transport_settings()
        self._interval = min(0.1, options.retry_interval / 2, options.heartbeat_interval / 4)
        self.begin()

    def begin(self) -> None:
        """Begin a life: at the start, and in the child after a fork."""
        options = self.options
        name = options.node_name()
        self.lock = threading.RLock()
        self.local = LocalChannels(name, options.capacity or options.buffer_size, self.lock)
        self.clock = PatientClock(self._interval)
        began = time.monotonic()
        self.node = EchoNode(
            name,
            secrets.token_hex(8),
            options.rules(),
            self.clock.now(),
            age=lambda: time.monotonic() - began,
        )
        self._reports = Reports(options, name)
        self._loop = None
        self._running: concurrent.futures.Future[None] | None = None
        self._run_task: asyncio.Task[Any] | None = None
        self._joined = concurrent.futures.Future()
        self._links: Links | None = None
        self._flush_waits = self._hurries = False
        self._unflushed = 0
        self._flushed_at = self._reset_at = float("-inf")
        self._refused_at = float("-inf")

    @property
    def has_transport(self) -> bool:
        """Whether messages leave the process."""
        return self._transport is not None

    def belongings(self) -> list[object]:
        """Return what must not be finalised in a forked child: it is the parent's."""
        return [self._loop, self._running, self._run_task, self._links]

    # From any thread.

    def publish(self, group: str, payload: bytes, index: int) -> None:
        """Write a message: to the channels here at once, to the other nodes soon."""
        record = (group, payload)
        if self._transport is None:
            self.local.deliver((record,))
            return
        with self.lock:
            self.node.write(index, record)
            self.local.deliver((record,))
            self._unflushed += 1
            if self._flush_waits and (self._hurries or self._unflushed < self.options.max_batch):
                return
            hurries = self._hurries = self._flush_waits  # a whole frame waits already
            self._flush_waits = True
        self._call(self._flush if hurries else self._plan_flush)

    def start(self) -> None:
        """Connect, if that isn't done yet. Doesn't wait."""
        if self._transport is None or self._running is not None:
            return
        with self.lock:
            if self._running is None:
                self._running = engine.submit(self._run)
                self._running.add_done_callback(self._ended)

    async def joined(self) -> None:
        """Wait until the other nodes know us, at most JOIN_TIMEOUT, once per process."""
        if self._transport is None or self._joined.done():
            return
        self.start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_TIMEOUT):
                await asyncio.shield(asyncio.wrap_future(self._joined))

    async def on_engine(self, make: Any) -> Any:
        """Run a coroutine on the engine's loop and return its result."""
        self.start()
        return await asyncio.wrap_future(engine.submit(make))

    def drain(self, timeout: float) -> bool:
        """Wait until every node has all that was written, at most `timeout` seconds."""
        return not self._wrote() or self._wait_for(lambda: self._drain(timeout), timeout)

    def leave(self, timeout: float) -> None:
        """Drain, say goodbye and disconnect. What comes after begins another life."""
        if self._running is not None:
            self._wait_for(lambda: self._leave(timeout), timeout + 2.0)
            self.begin()

    def _wrote(self) -> bool:
        with self.lock:
            return any(producer.ring.write_cursor for producer in self.node.producers)

    def _wait_for(self, make: Any, timeout: float) -> bool:
        if self._transport is None:
            return True
        self.start()
        future = engine.submit(make)
        try:
            return bool(future.result(timeout + 0.5))
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError, EngineStopped):
            future.cancel()
            return False

    def _call(self, function: Any) -> None:
        """Run `function()` on the engine's loop, which starts if need be."""
        loop = self._loop
        if loop is None:
            self.start()  # It flushes when it has started.
            return
        with contextlib.suppress(RuntimeError):  # It has just been closed.
            loop.call_soon_threadsafe(function)

    def _ended(self, future: concurrent.futures.Future[None]) -> None:
        with self.lock:
            if self._running is future:
                self._running = self._loop = None
                self._flush_waits = self._hurries = False
        error = None if future.cancelled() else future.exception()
        if error is not None and not isinstance(error, EngineStopped):
            logger.error("event=layer_failed error=%r", error)

    # On the engine's loop.

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        timeout = self.options.call_timeout
        links = Links(
            self._transport or {}, timeout=timeout, take=self._take, on_link=self._on_link
        )
        self._run_task = asyncio.current_task()
        with self.lock:
            self._links, self._loop = links, loop
            self.clock.tick()
        loop.call_later(JOIN_TIMEOUT, self._set_joined)
        clockwork = loop.create_task(self._keep_time(links))
        self._flush()
        try:
            await links.run()
        finally:
            clockwork.cancel()
            await asyncio.gather(clockwork, return_exceptions=True)

    async def _keep_time(self, links: Links) -> None:
        while True:
            await asyncio.sleep(self._interval)
            now = self.clock.tick()
            if not links.ready:
                continue
            with self.lock:
                effects = self.node.tick(now, time.time())
                fill = self.node.fill()
            self._perform(effects)
            self._reports.fill(fill, now)
            self._reset_if_deaf(links, now)

    def _reset_if_deaf(self, links: Links, now: float) -> None:
        """Make new links when nothing comes back, though sending seems to work."""
        patience = QUIET_BEATS * self.options.heartbeat_interval + self.options.call_timeout
        heard = self.node.echo_at if self.node.echo_at is not None else float("-inf")
        if now - max(heard, self._reset_at) < patience:
            return
        first, self._reset_at = self._reset_at == float("-inf"), now
        if first and self.node.echo_at is None:
            return  # It has only just begun.
        logger.warning("event=transport_deaf seconds=%.1f", now - heard)
        links.reset()

    def _on_link(self) -> None:
        """Say where we are: at the start, and when the transport may have forgotten us."""
        links = self._links
        if links is not None and links.ready:
            with self.lock:
                effects = self.node.addresses(
                    links.control.address, links.data.address, self.clock.now(), time.time()
                )
            self._perform(effects)

    def _plan_flush(self) -> None:
        loop = asyncio.get_running_loop()
        due = self._flushed_at + self.options.batch_interval
        if loop.time() >= due:
            self._flush()
        else:
            loop.call_at(due, self._flush)

    def _flush(self) -> None:
        with self.lock:
            self._flush_waits = self._hurries = False
            count, self._unflushed = self._unflushed, 0
            effects = self.node.flush(self.clock.now())
            fill = self.node.fill() if count else 0.0
        if count:
            self._flushed_at = asyncio.get_running_loop().time()
            self._reports.flushed(count, fill, effects)
        self._perform(effects)

    def _take(self, wire: bytes) -> None:
        try:
            frame = frames.decode(wire)
        except frames.FrameRefused as error:
            self._refuse(error)
            return
        if isinstance(frame, frames.Direct):
            with contextlib.suppress(Exception):  # full: at most once, by contract
                self.local.put(frame.channel, frame.message)
            return
        with self.lock:
            effects = self.node.on_frame(frame, self.clock.now(), time.time())
        if frame.boot == self.node.boot and not self._joined.done():
            asyncio.get_running_loop().call_later(JOIN_GRACE, self._set_joined)
        self._perform(effects)

    def _refuse(self, error: frames.FrameRefused) -> None:
        now = time.monotonic()
        if now - self._refused_at >= LOG_INTERVAL:
            self._refused_at = now
            logger.warning("event=frame_refused reason=%s", error)

    def _set_joined(self) -> None:
        if not self._joined.done():
            self._joined.set_result(None)

    def _perform(self, effects: Iterable[Effect]) -> None:
        links = self._links
        for effect in effects:
            match effect:
                case Deliver(records):
                    self.local.deliver(records)
                    self._reports.delivered(len(records))
                case Notify(notice):
                    self._reports.notice(notice, self.local.notify(notice.node, notice.missed))
                case Happened(what, details):
                    self._reports.happened(what, details)
                case _ if links is None:
                    pass
                case Send(address, frame):
                    links.send(address, frame)
                case SendBatch():
                    links.send_batch(effect, partial(self._send_failed, effect))
                case Broadcast(hello):
                    links.broadcast(hello)

    def _send_failed(self, effect: SendBatch, reason: str) -> None:
        with self.lock:
            effects = self.node.send_failed(
                effect.boot, effect.frame.index, reason, self.clock.now()
            )
        self._perform(effects)

    async def _drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self._joined.done() and self._loop is not None:
                self._flush()
                with self.lock:
                    # Having heard nothing at all, we know of nobody, which is no proof.
                    if self.node.echo_at is not None and self.node.drained():
                        return True
            await asyncio.sleep(0.01)
        return False

    async def _leave(self, timeout: float) -> bool:
        done = not self._wrote() or await self._drain(timeout)
        with self.lock:
            farewells = self.node.bye()
        sends = [
            self._links.send_now(effect.address, effect.frame)
            for effect in farewells
            if isinstance(effect, Send) and self._links is not None
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.gather(*sends)
        if self._run_task is not None:
            self._run_task.cancel()
            await asyncio.wait([self._run_task], timeout=1.5)
        return done

    # Plain sends, which pass through.

    async def send_to_node(self, boot: str, channel: str, payload: bytes) -> None:
        """Send to a channel of another node: at most once. Unknown node: nobody's channel."""
        with self.lock:
            peer = self.node.peers.get(boot)
        if peer is not None and self._links is not None:
            direct = frames.Direct(boot=self.node.boot, channel=channel, message=payload)
            await self._links.control.send(peer.control, frames.encode(direct))

    async def send_through(self, channel: str, message: dict[str, Any]) -> None:
        """Send to a channel that isn't a node's own, as the transport does."""
        await (await self._begun()).send_through(channel, message)

    async def receive_through(self, channel: str) -> dict[str, Any]:
        """Receive from such a channel. Cancelled, the receive goes on for the next caller."""
        return await (await self._begun()).receive_through(channel)

    async def _begun(self) -> Links:
        """Return the links; `_run` was submitted before whoever asks, so they are there."""
        links = self._links
        if links is None:
            raise LineDown
        return links
