"""Transports whose faults a test controls: in memory, channels-redis core, and pub/sub.

Every node gets an instance that knows the node's name and the hub that it belongs to; the
hub says what is wrong. `cut` loses what one node sends to another, in one direction, at
the receiving end, as a network does: the sender learns nothing. The in-memory transport
is Channels' own, with its queues and groups shared by the instances of one hub: they all
live on the engine's loop, where such queues are safe.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from channels.exceptions import ChannelFull
from channels.layers import InMemoryChannelLayer
from channels_redis.core import RedisChannelLayer
from channels_redis.pubsub import RedisPubSubChannelLayer

from echomq_app.core.echo import frames
from echomq_app.core.echo.frames import AnyFrame

KINDS = ("memory", "core", "pubsub")

Way = tuple[str, str]


@dataclasses.dataclass(slots=True)
class Hub:
    """What the instances of one hub have in common, and what is wrong with it."""

    channels: dict[str, Any] = dataclasses.field(default_factory=dict)
    groups: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    owners: dict[str, str] = dataclasses.field(default_factory=dict)
    cut: set[Way] = dataclasses.field(default_factory=set)
    hangs: set[Way] = dataclasses.field(default_factory=set)
    full: set[str] = dataclasses.field(default_factory=set)
    deaf: set[str] = dataclasses.field(default_factory=set)
    """Addresses where nothing arrives any more, though the link to them looks well."""
    loses: Callable[[AnyFrame], bool] | None = None
    """Whether this frame is lost, wherever it goes."""
    slow: float = 0.0
    """Seconds that every send takes."""
    sent: list[Way] = dataclasses.field(default_factory=list)

    def cut_between(self, one: str, other: str) -> None:
        """Lose everything, in both directions."""
        self.cut |= {(one, other), (other, one)}

    def heal(self) -> None:
        """Be well again."""
        self.cut.clear()
        self.hangs.clear()
        self.full.clear()
        self.loses = None
        self.slow = 0.0

    def own(self, node: str, channel: str) -> None:
        """Note whose channel this is. On core, the layer uses it without its local part."""
        self.owners[channel] = node
        if "!" in channel:
            self.owners[channel.partition("!")[0] + "!"] = node

    async def before_send(self, node: str, channel: str) -> None:
        """Do what is wrong on this way: hang, or refuse."""
        way = (node, self.owners.get(channel, ""))
        self.sent.append(way)
        if way in self.hangs:
            await asyncio.sleep(3600)
        if self.slow:
            await asyncio.sleep(self.slow)
        if way[1] in self.full:
            raise ChannelFull(channel)

    def lets_through(self, node: str, channel: str, message: Any) -> bool:
        if (message.pop("from", ""), node) in self.cut or channel in self.deaf:
            return False
        frame = message.get("frame")
        return self.loses is None or frame is None or not self.loses(frames.decode(frame))


hubs: dict[str, Hub] = {}


def hub(name: str) -> Hub:
    return hubs.setdefault(name, Hub())


class Memory(InMemoryChannelLayer):
    def __init__(self, hub_name: str, node: str) -> None:
        super().__init__(capacity=100_000)
        self.hub = hub(hub_name)
        self.node = node
        self.channels = self.hub.channels
        self.groups = self.hub.groups

    async def new_channel(self, prefix: str = "specific.") -> str:
        channel = await super().new_channel(prefix)
        self.hub.own(self.node, channel)
        return channel

    async def send(self, channel: str, message: dict[str, Any]) -> None:
        await self.hub.before_send(self.node, channel)
        await super().send(channel, {**message, "from": self.node})

    async def receive(self, channel: str) -> dict[str, Any]:
        while True:
            message = await super().receive(channel)
            if self.hub.lets_through(self.node, channel, message):
                return message


class Core(RedisChannelLayer):  # type: ignore[misc]
    def __init__(self, hub_name: str, node: str, **config: Any) -> None:
        super().__init__(**config)
        self.hub = hub(hub_name)
        self.node = node

    async def new_channel(self, prefix: str = "specific") -> str:
        channel: str = await super().new_channel(prefix)
        self.hub.own(self.node, channel)
        return channel

    async def send(self, channel: str, message: dict[str, Any]) -> None:
        await self.hub.before_send(self.node, channel)
        await super().send(channel, {**message, "from": self.node})

    async def group_send(self, group: str, message: dict[str, Any]) -> None:
        await super().group_send(group, {**message, "from": self.node})

    async def receive(self, channel: str) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = await super().receive(channel)
            if self.hub.lets_through(self.node, channel, message):
                return message


class PubSub(RedisPubSubChannelLayer):  # type: ignore[misc]
    def __init__(self, hub_name: str, node: str, **config: Any) -> None:
        super().__init__(**config)
        self.hub = hub(hub_name)
        self.node = node

    async def new_channel(self, prefix: str = "specific.") -> str:
        channel: str = await self._get_layer().new_channel(prefix)
        self.hub.own(self.node, channel)
        return channel

    async def send(self, channel: str, message: dict[str, Any]) -> None:
        await self.hub.before_send(self.node, channel)
        await self._get_layer().send(channel, {**message, "from": self.node})

    async def group_send(self, group: str, message: dict[str, Any]) -> None:
        await self._get_layer().group_send(group, {**message, "from": self.node})

    async def receive(self, channel: str) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = await self._get_layer().receive(channel)
            if self.hub.lets_through(self.node, channel, message):
                return message


_CLASSES = {"memory": Memory, "core": Core, "pubsub": PubSub}


def transport(kind: str, hub_name: str, node: str, url: str = "") -> dict[str, Any]:
    """Return what an EchoChannelLayer's option `transport` takes."""
    backend = f"{__name__}.{_CLASSES[kind].__name__}"
    config: dict[str, Any] = {"hub_name": hub_name, "node": node}
    if kind != "memory":
        config |= {"hosts": [url], "prefix": hub_name}
    return {"BACKEND": backend, "CONFIG": config}
