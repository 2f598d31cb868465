"""The channel layer itself: Channels' contract on top of a station."""

from __future__ import annotations

import contextlib
import contextvars
import secrets
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
from channels.layers import BaseChannelLayer

from ..engine.own_layer import OwnLayer
from .box import ChannelName
from .options import LayerOptions
from .stations import station


def _plain(value: object) -> object:
    """Return the builtin value of a subclass: a SafeString that was rendered, an IntEnum."""
    if isinstance(value, str):
        return str.__str__(value)  # str() of a SafeString is a SafeString
    kinds: tuple[Any, ...] = (int, float, bytes, list, tuple, dict)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(
        f"A message holds what MessagePack can: text, bytes, numbers, lists, dicts. A "
        f"{type(value).__name__} has to be turned into one of these."
    )


_sender: contextvars.ContextVar[str] = contextvars.ContextVar("echomq_sender", default="")
_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_names = BaseChannelLayer()


class EchoChannelLayer(BaseChannelLayer):
    """A channel layer whose groups are in order and whole, or say that they aren't.

        CHANNEL_LAYERS = {
            "default": {
                "BACKEND": "echomq_app.layers.EchoChannelLayer",
                "CONFIG": {"transport": "redis"},
            },
            "redis": {...},
        }

    `group_send` reaches every channel in the group, in all processes, in the order in
    which this process sent; where that is impossible, the channel first receives
    `{"type": "echo.cursor_expired", "node": ..., "missed": ...}`. It never waits for a
    broker or for another process. `send` is at most once, as with any layer. Without a
    transport everything stays in this process.

    Safe from all threads and loops. Options: see `LayerOptions` and docs/layer.md.
    """

    extensions = ["groups", "flush", "echo"]
    crosses_processes: bool = True
    """Whether what is sent can reach other processes: false without a transport."""

    def __init__(self, **config: Any) -> None:
        self.options = LayerOptions.from_config(config)
        super().__init__(capacity=self.options.capacity or self.options.buffer_size)
        self.crosses_processes = self.options.crosses_processes()
        self._station = station(self.options)

    @staticmethod
    @contextlib.contextmanager
    def sender(key: str) -> Iterator[None]:
        """Send what this block sends as `key`: with pool_size > 1, by the key's own producer.

        What one key sends stays in order. Without it, a process is one sender.
        """
        token = _sender.set(key)
        try:
            yield
        finally:
            _sender.reset(token)

    async def new_channel(self, prefix: str = "specific") -> str:
        """Return a new channel of this process."""
        self._station.start()
        name = ChannelName(f"{prefix}.{self._station.node.boot}!{secrets.token_hex(8)}")
        _names.require_valid_channel_name(name)
        self._station.local.open(name, owner=self)
        return name

    async def send(self, channel: str, message: dict[str, Any]) -> None:
        """Send to one channel, at most once; `ChannelFull` when it is full."""
        _check_message(message)
        _check_channel(channel)
        here = self._station
        boot = _boot_of(channel)
        if boot == here.node.boot:
            here.local.put(channel, _encode(message))
        elif boot:
            if here.has_transport:
                name, payload = str.__str__(channel), _encode(message)
                await here.joined()
                await here.on_engine(lambda: here.send_to_node(boot, name, payload))
        elif here.has_transport:
            await here.on_engine(lambda: here.send_through(channel, message))
        else:
            here.local.open(channel)
            here.local.put(channel, _encode(message))

    async def receive(self, channel: str) -> dict[str, Any]:
        """Return the channel's next message. Cancelling this loses none."""
        _check_channel(channel)
        here = self._station
        here.start()
        boot = _boot_of(channel)
        if boot and boot != here.node.boot:
            raise ValueError(
                f"Channel {channel!r} belongs to another process; only that one can receive from "
                "it. After a fork, make new channels with new_channel()."
            )
        if boot or not here.has_transport:
            return await here.local.receive(channel)
        message: dict[str, Any] = await here.on_engine(lambda: here.receive_through(channel))
        return message

    async def group_add(self, group: str, channel: str) -> None:
        """Let a channel of this process hear the group.

        It hears everything that is sent after this has returned. In a process that has
        just started, it waits until the other nodes know of it, at most 5 s.
        """
        _check_group(group)
        _check_channel(channel)
        here = self._station
        if here.has_transport and _boot_of(channel) != here.node.boot:
            raise ValueError(
                f"Channel {channel!r} is no channel of this process; groups are local to each. "
                "Join with a name that new_channel() gave here."
            )
        await here.joined()
        here.local.join(group, channel)

    async def group_discard(self, group: str, channel: str) -> None:
        """Let the channel hear the group no more; no error if it didn't."""
        _check_group(group)
        _check_channel(channel)
        self._station.local.leave(group, channel)

    async def group_send(self, group: str, message: dict[str, Any]) -> None:
        """Send to all channels in the group, in order; see the class. Never waits."""
        self.post(group, message)

    def post(self, group: str, message: dict[str, Any]) -> int:
        """Do what `group_send` does, from sync code; return how many channels here get it."""
        _check_message(message)
        _check_group(group)
        # A frame holds plain text only, and a group may be named by a member of an enum.
        plain = str.__str__(group)
        self._station.publish(plain, _encode(message), self._index())
        return self._station.local.members(plain)

    async def flush(self) -> None:
        """Forget all messages and groups here, and in the transport what it can forget."""
        here = self._station
        here.local.clear()
        transport = self.options.transport_settings()
        if transport is not None:
            await here.on_engine(lambda: _flush(transport))

    async def close(self) -> None:
        """Remove the channels that were made through this object. The node lives on."""
        self._station.local.close_all_of(self)

    def _index(self) -> int:
        size = self.options.pool_size
        return 0 if size == 1 else zlib.crc32(_sender.get().encode()) % size


async def _flush(transport: Any) -> None:
    own = OwnLayer(transport)
    try:
        if callable(flush := getattr(own.layer, "flush", None)):
            await flush()
    finally:
        await own.close(1.0)


def _boot_of(channel: str) -> str:
    """Return the boot id in a channel's name, "" if it isn't the channel of one process."""
    head, mark, _ = channel.partition("!")
    return str(head.rpartition(".")[2]) if mark else ""


def _check_message(message: object) -> None:
    if not isinstance(message, dict):
        raise TypeError(f"A message is a dict, not {type(message).__name__}.")


@lru_cache(maxsize=4096)
def _check_group(group: str) -> None:
    _names.require_valid_group_name(group)


def _check_channel(channel: str) -> None:
    # No cache here: it would keep the names of dead consumers alive.
    if not isinstance(channel, ChannelName):
        _names.require_valid_channel_name(channel)
