"""The protocol of `core.echo` at work on the engine's loop: links, timers, effects.

Made for one run of that loop, and gone with it. Everything here happens in one thread, one
thing after the other, so effects are done in the order in which the node wanted them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from ..core.echo import frames
from ..core.echo.effects import Broadcast, Deliver, Effect, Happened, Notify, Send, SendBatch
from ..core.echo.peers import QUIET_BEATS
from .life import Life
from .links import Links
from .options import LayerOptions

logger = logging.getLogger("echomq")

JOIN_GRACE = 0.2
"""Seconds after our own hello came back in which the others' answers come."""
TRANSPORT_TIMEOUT = 5.0
"""Seconds that the transport may take for a send, if `call_timeout` isn't longer. An ack may be
wanted sooner; but to cut a send short costs a connection, and the next one takes longer."""
FAREWELL_TIMEOUT = 0.5
LOG_INTERVAL = 10.0


class Driver:
    """Lets one life of a node speak over the transport."""

    def __init__(
        self, life: Life, options: LayerOptions, transport: Mapping[str, Any], *, tick: float
    ) -> None:
        self._life = life
        self._options = options
        self._tick = tick
        self._reset_at = self._refused_at = float("-inf")
        timeout = max(options.call_timeout, TRANSPORT_TIMEOUT)
        self.links = Links(transport, timeout=timeout, take=self._take, on_link=self._on_link)

    async def run(self) -> None:
        """Keep the node going until cancelled."""
        clockwork = asyncio.get_running_loop().create_task(self._keep_time())
        self.flush()
        try:
            await self.links.run()
        finally:
            clockwork.cancel()
            await asyncio.gather(clockwork, return_exceptions=True)

    def plan_flush(self) -> None:
        """Flush at once after a pause, else when the interval is over."""
        loop = asyncio.get_running_loop()
        due = self._life.pace.due()
        if loop.time() >= due:
            self.flush()
        else:
            loop.call_at(due, self.flush)

    def flush(self) -> None:
        """Send what was written to all who have no frame in flight."""
        life = self._life
        with life.lock:
            count = life.pace.flushes(asyncio.get_running_loop().time())
            effects = life.node.flush(life.clock.now())
            fill = life.node.fill() if count else 0.0
        if count:
            life.reports.flushed(count, fill, effects)
        self._perform(effects)

    async def drain(self, timeout: float) -> bool:
        """Wait until every node that we know has everything."""
        life = self._life
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if life.joined.done():
                self.flush()
                with life.lock:
                    # Having heard nothing at all, we know of nobody, which is no proof.
                    if life.node.echo_at is not None and life.node.drained():
                        return True
            await asyncio.sleep(0.01)
        return False

    async def say_goodbye(self) -> None:
        """Tell the other nodes that we leave, and wait for the transport to take it."""
        with self._life.lock:
            farewells = self._life.node.bye()
        sends = [
            self.links.send_now(effect.address, effect.frame)
            for effect in farewells
            if isinstance(effect, Send)
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_TIMEOUT):
                await asyncio.gather(*sends)

    async def send_to_node(self, boot: str, channel: str, payload: bytes) -> None:
        """Send to a channel of another node: at most once. Unknown node: nobody's channel."""
        with self._life.lock:
            peer = self._life.node.peers.get(boot)
        if peer is not None:
            direct = frames.Direct(boot=self._life.node.boot, channel=channel, message=payload)
            await self.links.control.send(peer.control, frames.encode(direct))

    async def _keep_time(self) -> None:
        life = self._life
        while True:
            await asyncio.sleep(self._tick)
            now = life.clock.tick()
            if not self.links.ready:
                continue
            with life.lock:
                effects = life.node.tick(now, time.time())
                fill = life.node.fill()
            self._perform(effects)
            life.reports.fill(fill, now)
            self._reset_if_deaf(now)

    def _reset_if_deaf(self, now: float) -> None:
        """Make new links when nothing comes back, though sending seems to work."""
        options, echo_at = self._options, self._life.node.echo_at
        patience = QUIET_BEATS * options.heartbeat_interval + options.call_timeout
        heard = echo_at if echo_at is not None else float("-inf")
        if now - max(heard, self._reset_at) < patience:
            return
        first, self._reset_at = self._reset_at == float("-inf"), now
        if first and echo_at is None:
            return  # It has only just begun.
        logger.warning("event=transport_deaf seconds=%.1f", now - heard)
        self.links.reset()

    def _on_link(self) -> None:
        """Say where we are: at the start, and when the transport may have forgotten us."""
        life, links = self._life, self.links
        if links.ready:
            with life.lock:
                effects = life.node.addresses(
                    links.control.address, links.data.address, life.clock.now(), time.time()
                )
            self._perform(effects)

    def _take(self, wire: bytes) -> None:
        life = self._life
        try:
            frame = frames.decode(wire)
        except frames.FrameRefused as error:
            self._refuse(error)
            return
        if isinstance(frame, frames.Direct):
            with contextlib.suppress(Exception):  # full: at most once, by contract
                life.local.put(frame.channel, frame.message)
            return
        with life.lock:
            effects = life.node.on_frame(frame, life.clock.now(), time.time())
        if frame.boot == life.node.boot and not life.joined.done():
            asyncio.get_running_loop().call_later(JOIN_GRACE, life.set_joined)
        self._perform(effects)

    def _refuse(self, error: frames.FrameRefused) -> None:
        now = time.monotonic()
        if now - self._refused_at >= LOG_INTERVAL:
            self._refused_at = now
            logger.warning("event=frame_refused reason=%s", error)

    def _perform(self, effects: Iterable[Effect]) -> None:
        life = self._life
        for effect in effects:
            match effect:
                case Deliver(records):
                    life.local.deliver(records)
                    life.reports.delivered(len(records))
                case Notify(notice):
                    told = life.local.notify(notice.node, notice.missed)
                    life.reports.notice(notice, told)
                case Happened(what, details):
                    life.reports.happened(what, details)
                case Send(address, frame):
                    self.links.send(address, frame)
                case SendBatch():
                    self.links.send_batch(effect, partial(self._send_failed, effect))
                case Broadcast(hello):
                    self.links.broadcast(hello)

    def _send_failed(self, effect: SendBatch, reason: str) -> None:
        life = self._life
        with life.lock:
            effects = life.node.send_failed(
                effect.boot, effect.frame.index, reason, life.clock.now()
            )
        self._perform(effects)
