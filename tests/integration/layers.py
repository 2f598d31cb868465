"""Nodes of the EchoChannelLayer in one process, for the tests of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from echomq_app import engine
from echomq_app.core.echo.node import EchoNode
from echomq_app.layers import EchoChannelLayer, driver
from echomq_app.layers.stations import forget_all, leave_all
from tests.layer_transport import Hub, hub, hubs, transport
from tests.wait import wait_until_async

_hubs = itertools.count()

QUICK = {
    "batch_interval": 0.0,
    "call_timeout": 2.0,
    "retry_interval": 0.05,
    "heartbeat_interval": 0.3,
    "forget_after": 30.0,
}
"""Options that make things happen soon; the timeout is for a machine that stalls."""


class Nodes:
    """Makes nodes on one transport."""

    def __init__(self, kind: str, url: str = "") -> None:
        self.kind = kind
        self._url = url
        self._name = f"hub{next(_hubs)}"

    @property
    def hub(self) -> Hub:
        return hub(self._name)

    def make(self, node: str, **options: Any) -> EchoChannelLayer:
        """Return the layer of a node, as another process would have it."""
        way = transport(self.kind, self._name, node, self._url)
        return EchoChannelLayer(transport=way, node=node, **{**QUICK, **options})

    async def pair(self, **options: Any) -> tuple[EchoChannelLayer, EchoChannelLayer]:
        """Return two nodes that know each other."""
        one, other = self.make("a", **options), self.make("b", **options)
        await meet(one, other)
        return one, other


def state(layer: EchoChannelLayer) -> EchoNode:
    return layer._station.node


async def meet(*layers: EchoChannelLayer) -> None:
    """Wait until each of them sends to each other one."""
    for layer in layers:
        layer._station.start()
    boots = {state(layer).boot for layer in layers}

    def seated() -> bool:
        return all(
            set(producer.links) >= boots - {state(layer).boot}
            for layer in layers
            for producer in state(layer).producers
        )

    await wait_until_async(seated, 30)


async def subscriber(layer: EchoChannelLayer, group: str = "g") -> str:
    channel = await layer.new_channel()
    await layer.group_add(group, channel)
    return channel


async def take(layer: EchoChannelLayer, channel: str, count: int = 1) -> list[Any]:
    """Return the next messages, briefly: numbers, and the nodes' names of notices."""
    found = []
    for _ in range(count):
        message = await asyncio.wait_for(layer.receive(channel), 30)
        found.append(message["node"] if message["type"] == "echo.cursor_expired" else message["n"])
    return found


async def write(layer: EchoChannelLayer, *numbers: int, group: str = "g") -> None:
    for number in numbers:
        await layer.group_send(group, {"type": "test.message", "n": number})


@contextlib.contextmanager
def clean_layers(*, redis: bool = True) -> Iterator[None]:
    """End all nodes after the block, and the engine.

    Nodes introduce themselves in less time than in earnest: tests `meet` where it counts.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "JOIN_GRACE", 0.02)
        try:
            yield
        finally:
            leave_all(0.2)
            forget_all()
            assert engine.stop()
            hubs.clear()
            if redis:
                with warnings.catch_warnings():
                    # Cancelled while it connects, redis-py leaves the socket to the collector.
                    warnings.simplefilter("ignore", ResourceWarning)
                    gc.collect()
