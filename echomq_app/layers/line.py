"""One instance of the transport that is ours alone: an address, and what comes in there.

A link that breaks keeps its address: the same instance receives again, with a backoff,
until it works. `reset` makes a new one, for a link that looks well and hears nothing.
A receive is never timed out by cancelling it (pub/sub would unsubscribe).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from ..core.retry import full_jitter
from ..engine.own_layer import OwnLayer, is_idle_timeout

logger = logging.getLogger("echomq")

FRAME = "echomq.frame"
BACKOFF_BASE = 0.02
BACKOFF_CAP = 0.5
CLOSING_TIMEOUT = 1.0
_CORE_CAPACITY = 10_000


class LineDown(Exception):
    """There is no link at the moment."""

    def __init__(self) -> None:
        super().__init__("no link to the transport")


class Line:
    """Made and used on the engine's loop."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        timeout: float,
        take: Callable[[bytes], None],
        on_link: Callable[[], None],
    ) -> None:
        """`take(wire)` gets every frame; `on_link()` hears that the link is new, or back."""
        self.address = ""
        self._settings = _fit(settings)
        self._as_text = settings.get("CONFIG", {}).get("serializer_format", "msgpack") != "msgpack"
        self._timeout = timeout
        self._take = take
        self._on_link = on_link
        self._own: OwnLayer | None = None
        self._again = asyncio.Event()

    async def run(self) -> None:
        """Keep a link up, for ever."""
        failures = 0
        while True:
            try:
                await self._keep()
                failures = 0
            except Exception as error:  # noqa: BLE001  (a transport may raise anything)
                failures += 1
                if failures & (failures - 1) == 0:
                    logger.warning("event=transport_failed failures=%d error=%r", failures, error)
                await _back_off(failures)

    def reset(self) -> None:
        """Give up this link and make another one, with a new address."""
        self._again.set()

    @property
    def layer(self) -> Any:
        """The transport's instance; `LineDown` when there is none."""
        if self._own is None:
            raise LineDown
        return self._own.layer

    async def join(self, group: str) -> None:
        """Hear what is sent to the group. Once more does no harm."""
        async with asyncio.timeout(self._timeout):
            await self.layer.group_add(group, self.address)

    async def send(self, address: str, wire: bytes) -> None:
        """Send a frame to an address. Returning doesn't mean that it arrives."""
        async with asyncio.timeout(self._timeout):
            await self.layer.send(address, self._message(wire))

    async def send_to_group(self, group: str, wire: bytes) -> None:
        """Send a frame to all who joined the group."""
        async with asyncio.timeout(self._timeout):
            await self.layer.group_send(group, self._message(wire))

    def _message(self, wire: bytes) -> dict[str, Any]:
        frame = base64.b64encode(wire).decode() if self._as_text else wire
        return {"type": FRAME, "frame": frame}

    async def _keep(self) -> None:
        own = OwnLayer(self._settings, on_reconnect=self._on_link)
        try:
            async with asyncio.timeout(self._timeout):
                channel = await own.layer.new_channel()
            # On core the part behind the "!" would send it to another host of several.
            self.address = channel.partition("!")[0] + "!" if own.is_core else channel
            own.receiver = asyncio.create_task(self._receive(own, self.address))
            self._own = own
            self._again.clear()
            self._on_link()
            await self._again.wait()
        finally:
            self._own = None
            await _unhurried(own.close(CLOSING_TIMEOUT))

    async def _receive(self, own: OwnLayer, channel: str) -> None:
        failures = 0
        while True:
            try:
                message = await own.layer.receive(channel)
            except Exception as error:  # noqa: BLE001
                if is_idle_timeout(error):
                    own.link_is_new()
                failures += 1
                if failures & (failures - 1) == 0:
                    logger.info("event=transport_broken failures=%d error=%r", failures, error)
                await _back_off(failures)
                continue
            failures = 0
            frame = message.get("frame") if isinstance(message, dict) else None
            if isinstance(frame, str):
                with contextlib.suppress(ValueError):
                    frame = base64.b64decode(frame, validate=True)
            if isinstance(frame, bytes):
                try:
                    self._take(frame)
                except Exception:  # or we would be deaf from here on
                    logger.exception("event=frame_failed frame=%.200r", frame)
            else:
                logger.warning("event=bad_message message=%.200r", message)


def _fit(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the transport's settings with room for a frame from each of many nodes."""
    config = dict(settings.get("CONFIG") or {})
    if settings["BACKEND"] == "channels_redis.core.RedisChannelLayer":
        config["capacity"] = max(_CORE_CAPACITY, config.get("capacity", 0))
    return {**settings, "CONFIG": config}


async def _unhurried(closing: Coroutine[Any, Any, None]) -> None:
    """Run it to its end, also when we are cancelled meanwhile: a stop may cancel twice."""
    task = asyncio.get_running_loop().create_task(closing)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


async def _back_off(failures: int) -> None:
    await asyncio.sleep(
        full_jitter(failures, base=BACKOFF_BASE, cap=BACKOFF_CAP, random=random.random)
    )
