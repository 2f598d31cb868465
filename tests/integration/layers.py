"""Nodes of the EchoChannelLayer in one process, for the tests of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from echomq_app import engine
from echomq_app.core.echo.frames import AnyFrame, Batch, Hello
from echomq_app.core.echo.node import EchoNode
from echomq_app.layers import EchoChannelLayer, driver
from echomq_app.layers.stations import forget_all, leave_all
from tests.layer_transport import KINDS, Hub, hub, hubs, transport
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


IMPATIENT = {"call_timeout": 0.3, "forget_after": 1.0}
"""Options of nodes that soon give each other up."""


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


class Wire:
    """Sees all frames that arrive at the nodes of a hub, and loses some."""

    def __init__(self, nodes: Nodes) -> None:
        self.frames: list[AnyFrame] = []
        self.loses: Callable[[AnyFrame], bool] = lambda frame: False
        nodes.hub.loses = self._judge

    def _judge(self, frame: AnyFrame) -> bool:
        self.frames.append(frame)
        return self.loses(frame)

    def batches(self) -> list[Batch]:
        return [frame for frame in self.frames if isinstance(frame, Batch)]

    async def hears_hellos(self, count: int) -> None:
        """Let so many heartbeats go by."""
        before = len(self.frames)

        def enough() -> bool:
            return sum(isinstance(frame, Hello) for frame in self.frames[before:]) >= count

        await wait_until_async(enough, 60)

    def heal(self) -> None:
        self.loses = lambda frame: False


@pytest.fixture(params=KINDS, name="nodes")
def nodes_on_each_transport(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Run the test three times: in memory, channels-redis core, and pub/sub."""
    url = request.getfixturevalue("redis_url") if request.param != "memory" else ""
    with clean_layers(redis=bool(url)):
        yield Nodes(request.param, url)


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


def knows(layer: EchoChannelLayer, other: EchoChannelLayer) -> bool:
    return state(other).boot in state(layer).peers


async def settled(*layers: EchoChannelLayer) -> None:
    """Wait until everybody has acked everything."""
    await wait_until_async(lambda: all(state(layer).drained() for layer in layers), 30)


async def failed(layer: EchoChannelLayer) -> None:
    """Wait until a node has noticed that a batch isn't acked."""
    await wait_until_async(lambda: any(peer.suspect for peer in state(layer).peers.values()), 30)


def crash(layer: EchoChannelLayer) -> None:
    """End a node without a word, as SIGKILL does."""
    running = layer._station._running
    assert running is not None
    running.cancel()


async def take(layer: EchoChannelLayer, channel: str, count: int = 1) -> list[Any]:
    """Return the next messages, briefly: numbers, and the nodes' names of notices."""
    found = []
    for _ in range(count):
        message = await asyncio.wait_for(layer.receive(channel), 30)
        found.append(message["node"] if message["type"] == "echo.cursor_expired" else message["n"])
    return found


async def take_numbers(layer: EchoChannelLayer, channel: str, count: int) -> list[Any]:
    """Return what comes, notices too, until so many messages have come."""
    heard: list[Any] = []
    while sum(isinstance(n, int) for n in heard) < count:
        heard += await take(layer, channel)
    return heard


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
