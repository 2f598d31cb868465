"""A node's two links to its transport, for as long as the engine's loop lives.

One is for control (hello, ack, bye), one for data (batches, and plain sends that pass
through), so an ack never stands in line behind a batch.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ..core.echo import frames
from ..core.echo.effects import SendBatch
from .line import Line, LineDown

logger = logging.getLogger("echomq")

HELLO_GROUP = "emq.echo.hello"


class Links:
    """Made and used on the engine's loop. Nothing here raises but what passes through."""

    def __init__(
        self,
        transport: Mapping[str, Any],
        *,
        timeout: float,
        take: Callable[[bytes], None],
        on_link: Callable[[], None],
    ) -> None:
        """`take` gets every frame that comes in; `on_link` hears that a link is new or back."""
        self.control = Line(transport, timeout=timeout, take=take, on_link=on_link)
        self.data = Line(transport, timeout=timeout, take=take, on_link=on_link)
        self._timeout = timeout
        self._closing = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._encoded: tuple[tuple[str, int, int, int], bytes] | None = None
        self._receives: dict[str, asyncio.Task[dict[str, Any]]] = {}

    @property
    def ready(self) -> bool:
        """Whether both have an address."""
        return bool(self.control.address and self.data.address)

    async def run(self) -> None:
        """Keep both up, for ever; then end everything that was begun here."""
        lines = [self._spawn(line.run()) for line in (self.control, self.data)]
        try:
            await asyncio.wait(lines)
        finally:
            # What sends has to end first, and nothing new may begin: it would open
            # connections that nobody closes.
            self._closing = True
            for tasks in (self._tasks - set(lines), lines):
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def reset(self) -> None:
        """Make both anew."""
        self.control.reset()
        self.data.reset()

    def broadcast(self, hello: frames.Hello) -> None:
        """Send to all nodes, in the background."""
        self._begin(self._broadcast(frames.encode(hello)))

    def send(self, address: str, frame: frames.AnyFrame) -> None:
        """Send to one node, in the background."""
        self._begin(self.send_now(address, frame))

    def send_batch(self, effect: SendBatch, failed: Callable[[str], None]) -> None:
        """Send a batch in the background; `failed(reason)` if the transport won't."""
        self._begin(self._send_batch(effect.address, self._encode(effect.frame), failed))

    async def send_now(self, address: str, frame: frames.AnyFrame) -> None:
        """Send to one node and wait for the transport, not for the node."""
        try:
            await self.control.send(address, frames.encode(frame))
        except Exception as error:  # noqa: BLE001  (only acks count)
            logger.debug("event=send_failed address=%s error=%r", address, error)

    async def send_through(self, channel: str, message: dict[str, Any]) -> None:
        """Send to a channel that isn't a node's own, as the transport does."""
        await (await self._user_layer()).send(channel, message)

    async def receive_through(self, channel: str) -> dict[str, Any]:
        """Receive from such a channel. Cancelled, the receive goes on for the next caller."""
        layer = await self._user_layer()
        task = self._receives.get(channel)
        if task is None:
            task = self._receives[channel] = self._spawn(layer.receive(channel))
        try:
            return await asyncio.shield(task)
        finally:
            if task.done() and self._receives.get(channel) is task:
                del self._receives[channel]

    async def _user_layer(self) -> Any:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self.data.layer
            except LineDown:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.02)

    def _encode(self, batch: frames.Batch) -> bytes:
        """Encode a batch, once for all nodes that get the same."""
        key = (batch.control, batch.index, batch.base, len(batch.records))
        last = self._encoded
        if last is None or last[0] != key:
            last = self._encoded = (key, frames.encode(batch))
        return last[1]

    async def _broadcast(self, wire: bytes) -> None:
        # Joining the group again makes up for a broker that forgot it.
        try:
            await self.control.join(HELLO_GROUP)
            await self.control.send_to_group(HELLO_GROUP, wire)
        except Exception as error:  # noqa: BLE001  (the next heartbeat tries again)
            logger.debug("event=hello_failed error=%r", error)

    async def _send_batch(self, address: str, wire: bytes, failed: Callable[[str], None]) -> None:
        try:
            await self.data.send(address, wire)
        except Exception as error:  # noqa: BLE001
            failed(f"{type(error).__name__}: {error}")

    def _begin(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if self._closing:
            coroutine.close()
        else:
            self._spawn(coroutine)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
