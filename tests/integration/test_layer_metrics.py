"""Prometheus metrics of the layer, and its memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from echomq_app.core.echo.effects import Send
from echomq_app.core.echo.node import EchoNode
from echomq_app.core.echo.peers import Rules
from echomq_app.layers.metrics import LayerMetrics
from tests.integration.layers import Nodes, clean_layers, state, subscriber, take, write
from tests.wait import wait_until_async


async def test_what_is_counted() -> None:
    registry = CollectorRegistry()
    metrics = LayerMetrics(registry)

    def value(name: str) -> float:
        return registry.get_sample_value(f"echomq_layer_{name}") or 0.0

    try:
        with clean_layers():
            nodes = Nodes("memory")
            a, b = await nodes.pair(buffer_size=4, call_timeout=0.3)
            channel = await subscriber(b)
            await write(a, 1, 2)
            assert await take(b, channel, 2) == [1, 2]
            await wait_until_async(state(a).drained, 30)
            nodes.hub.cut_between("a", "b")
            await write(a, *range(10))
            await wait_until_async(lambda: value("failures_total"), 30)
            nodes.hub.heal()
            await wait_until_async(state(a).drained, 30)
            assert value("flushed_messages_total") == 12
            assert value("delivered_messages_total") == 2
            assert value("nodes") == 1
            assert value("ack_seconds_count") >= 2
            for name in ("expiries", "notices", "failures", "retries"):
                assert value(f"{name}_total") >= 1, name
            assert b"echomq_layer_buffer_fill" in generate_latest(registry)
    finally:
        metrics.close()
    assert generate_latest(registry) == b""


def test_a_million_messages_with_a_dead_node_need_no_more_than_the_ring() -> None:
    node = EchoNode("a", "a", Rules(), 0.0, lambda: 0.0)
    dead = EchoNode("b", "b", Rules(), 0.0, lambda: 0.0)
    meet(node, dead)
    assert node.producers[0].links

    def write_and_tick(count: int, start: int) -> None:
        for number in range(start, start + count):
            node.write(0, ("g", b"%020d" % number))
            if number % 1000 == 0:
                node.flush(number / 1000)
                node.tick(number / 1000)

    write_and_tick(20_000, 0)
    tracemalloc.start()
    write_and_tick(20_000, 20_000)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    write_and_tick(940_000, 40_000)
    tracemalloc.start()
    write_and_tick(20_000, 980_000)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after < before * 1.05 + 10_000
    assert not node.peers  # forgotten: silent, and what it needs is overwritten
    assert not node.producers[0].links
    assert node.producers[0].ring.write_cursor == 1_000_000


def meet(*nodes: EchoNode) -> None:
    """Let the nodes exchange hellos until they have nothing more to say."""
    frames: list[Any] = [(one, node.announce(0.0)[0]) for one in nodes for node in nodes]
    while frames:
        receiver, effect = frames.pop(0)
        for answer in receiver.on_frame(effect.frame, 0.0):
            if isinstance(answer, Send):
                frames += [(other, answer) for other in nodes if other is not receiver]
