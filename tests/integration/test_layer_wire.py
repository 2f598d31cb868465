"""Frames that are no frames, or of another version, or that come when we fail; odd transports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from echomq_app.core.echo import frames
from echomq_app.layers import EchoChannelLayer
from tests.integration.layers import (
    Nodes,
    clean_layers,
    meet,
    nodes_on_each_transport,
    state,
    subscriber,
    take,
    write,
)
from tests.layers import CORE, PUBSUB
from tests.servers import Redis
from tests.wait import wait_until_async

__all__ = ["nodes_on_each_transport"]

STRANGERS: list[dict[str, Any]] = [
    {"type": "x"},
    {"type": "echomq.frame"},
    {"type": "echomq.frame", "frame": b""},
    {"type": "echomq.frame", "frame": b"\x02\x90"},  # a later version
    {"type": "echomq.frame", "frame": b"\x01\xff"},
    {"type": "echomq.frame", "frame": b"\x01\x92\xa1b\x01"},  # a batch with nothing in it
    {"type": "echomq.frame", "frame": "no base64!"},
    {"type": "echomq.frame", "frame": 5},
]


async def test_what_comes_in_malformed_or_foreign_kills_nobody(nodes: Nodes) -> None:
    a, b = await nodes.pair()
    channel = await subscriber(b)
    transport = a._station.links.control.layer
    for address in (state(b).control, state(b).data):
        for junk in STRANGERS:
            await a._station.on_engine(partial(transport.send, address, dict(junk)))
    # Well made, by somebody who can't be: no such producer, no such node.
    for frame in (
        frames.Ack(boot=state(a).boot, to=state(b).boot, index=9, cursor=2**40),
        frames.Ack(boot="nobody", to=state(b).boot, index=0, cursor=1),
        frames.Ack(boot=state(a).boot, to="nobody", index=0, cursor=1),
        frames.Direct(boot="nobody", channel="nowhere!1", message=b"\x80"),
    ):
        message = {"type": "echomq.frame", "frame": frames.encode(frame)}
        await a._station.on_engine(partial(transport.send, state(b).control, message))
    await write(a, 1)
    assert await take(b, channel) == [1]
    await write(b, 2)
    assert await take(b, channel) == [2]


async def test_a_node_that_fails_in_the_middle_of_a_batch_gets_it_again(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = await nodes.pair(call_timeout=0.3)
    channel = await subscriber(b)
    on_frame, failures = state(b).on_frame, [KeyError("x")]

    def fail_once(*frame: Any) -> Any:
        if failures:
            raise failures.pop()
        return on_frame(*frame)

    monkeypatch.setattr(state(b), "on_frame", fail_once)
    await write(a, 1)
    assert await take(b, channel) == [1]
    assert "event=frame_failed" in caplog.text


async def test_a_wire_version_that_is_not_understood_stays_buffered(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await nodes.pair(call_timeout=0.3)
    channel = await subscriber(b)
    monkeypatch.setattr(frames, "VERSION", 2)  # a is deployed first
    await write(a, 1, 2)
    lag = state(a).producers[0].lag
    await wait_until_async(lambda: any(peer.failures for peer in state(a).peers.values()), 30)
    assert lag(state(b).boot) == 2
    monkeypatch.setattr(frames, "READABLE", frozenset({1, 2}))  # then b
    assert await take(b, channel, 2) == [1, 2]


async def test_a_transport_that_writes_json(redis_url: str) -> None:
    def make(node: str) -> EchoChannelLayer:
        config = {"hosts": [redis_url], "serializer_format": "json", "prefix": "json"}
        return EchoChannelLayer(transport={"BACKEND": CORE, "CONFIG": config}, node=node)

    with clean_layers():
        a, b = make("a"), make("b")
        await meet(a, b)
        channel = await subscriber(b)
        await write(a, 1)
        assert await take(b, channel) == [1]


@pytest.mark.parametrize("backend", [CORE, PUBSUB])
async def test_a_transport_of_several_hosts(backend: str, make_redis: Callable[..., Redis]) -> None:
    hosts = [make_redis().url, make_redis().url]

    def make(node: str) -> EchoChannelLayer:
        transport = {"BACKEND": backend, "CONFIG": {"hosts": hosts}}
        return EchoChannelLayer(transport=transport, node=node)

    with clean_layers():
        nodes = [make(f"n{number}") for number in range(4)]
        channels = [await subscriber(node) for node in nodes]
        await meet(*nodes)
        for number, node in enumerate(nodes):
            await write(node, number)
        for node, channel in zip(nodes, channels, strict=True):
            assert sorted(await take(node, channel, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["core", "pubsub"])
async def test_connections_that_are_killed_more_often_than_anybody_retries(
    kind: str, make_redis: Callable[..., Redis]
) -> None:
    server = make_redis()
    with clean_layers(), server.client() as client:
        a, b = await Nodes(kind, server.url).pair()
        channel = await subscriber(b)
        for number in range(60):
            await asyncio.to_thread(client.client_kill_filter, _type="normal", skipme=True)
            await asyncio.to_thread(client.client_kill_filter, _type="pubsub", skipme=True)
            await write(a, number)
        assert await take(b, channel, 60) == list(range(60))
