"""The rules of the protocol, each on all three transports, between nodes of one process.

What is lost here is lost frame by frame, so a test says exactly which one it is about.
"""

from __future__ import annotations

import asyncio
from typing import Any

from echomq_app.core.echo.frames import Ack, AnyFrame, Batch
from echomq_app.layers import EchoChannelLayer, drain
from tests.integration.layers import (
    IMPATIENT,
    Nodes,
    Wire,
    failed,
    knows,
    meet,
    nodes_on_each_transport,
    settled,
    state,
    subscriber,
    take,
    write,
)
from tests.wait import wait_until_async

__all__ = ["nodes_on_each_transport"]


def is_batch(frame: AnyFrame) -> bool:
    return isinstance(frame, Batch)


def in_order_after(notice: str, heard: list[Any], last: int) -> bool:
    """Tell whether it is the notice, and then all numbers up to `last` from some one on."""
    first = heard[1]
    return heard == [notice, *range(first, last + 1)]


# Frames, acks, and the jump over a hole.


async def test_a_backlog_of_1200_goes_in_frames_of_500(nodes: Nodes) -> None:
    a, b = await nodes.pair(batch_interval=1000.0, max_batch=500)
    there = await subscriber(b)
    await write(a, 0)  # after a pause: at once, and then not before 500 are there
    assert await take(b, there) == [0]
    await settled(a)
    wire = Wire(nodes)
    wire.loses = lambda frame: isinstance(frame, Ack)  # so the second frame has to wait
    await write(a, *range(1, 1201))
    assert await take(b, there, 500) == list(range(1, 501))
    wire.heal()
    assert await asyncio.to_thread(drain, 30)
    assert await take(b, there, 700) == list(range(501, 1201))
    assert [len(batch.records) for batch in wire.batches()] == [500, 500, 200]


async def test_one_frame_is_in_flight_to_a_node(nodes: Nodes) -> None:
    a, b = await nodes.pair(call_timeout=30.0, heartbeat_interval=1.0, forget_after=60.0)
    there = await subscriber(b)
    wire = Wire(nodes)
    wire.loses = lambda frame: isinstance(frame, Ack)
    await write(a, 0)
    assert await take(b, there) == [0]
    for number in range(1, 20):
        await write(a, number)
        await a._station.on_engine(lambda: asyncio.sleep(0))
    assert len(wire.batches()) == 1
    wire.heal()  # b's next heartbeat says what it has
    assert await take(b, there, 19) == list(range(1, 20))


async def test_a_node_that_has_everything_is_sent_nothing(nodes: Nodes) -> None:
    a, b = await nodes.pair()
    there = await subscriber(b)
    await write(a, 1)
    assert await take(b, there) == [1]
    await settled(a, b)
    wire = Wire(nodes)
    await wire.hears_hellos(8)
    assert wire.batches() == []


async def test_the_notice_and_what_follows_are_one_frame_and_a_busy_producer_gets_it_over(
    nodes: Nodes,
) -> None:
    a, b = await nodes.pair(buffer_size=300, max_batch=20, call_timeout=0.3, capacity=10_000)
    there = await subscriber(b)
    link = state(a).producers[0].links[state(b).boot]
    wire = Wire(nodes)
    wire.loses = is_batch
    await write(a, *range(500))
    await wait_until_async(lambda: sum(one.base > 0 for one in wire.batches()) >= 3, 60)
    assert link.read == 0  # the notice was sent, and nobody has said that it arrived
    await write(a, *range(500, 510))
    await wait_until_async(lambda: wire.batches()[-1].records, 60)
    # From where it was prepared at first: it doesn't run after the write cursor.
    assert {one.base for one in wire.batches()} <= {0, 500}
    wire.frames.clear()
    wire.heal()
    written, heard = 510, list[Any]()
    while len(heard) < 100:
        if written < max(500, link.read) + 250:  # else the ring would run over once more
            await write(a, written, written + 1)
            written += 2
        heard += await take(b, there, min(1, len(waiting(b, there))))
        await asyncio.sleep(0.002)
    await settled(a)
    heard += await take(b, there, len(waiting(b, there)))
    first = wire.batches()[0]
    assert first.records
    assert heard[:2] == ["a", first.base]
    assert heard.count("a") == 1
    assert in_order_after("a", heard, written - 1)


def waiting(layer: EchoChannelLayer, channel: str) -> Any:
    """Return what waits in a channel."""
    return layer._station.local.open(channel).items


async def test_a_node_that_refuses_12_into_a_ring_of_10_is_told_first(nodes: Nodes) -> None:
    a, b = await nodes.pair(buffer_size=10)
    there = await subscriber(b)
    nodes.hub.full.add("b")  # it stays a member: its heartbeats come
    for number in range(12):
        await write(a, number)
        await failed(a)
    assert knows(a, b)
    nodes.hub.heal()
    await settled(a)
    await write(a, 12)
    heard = await take(b, there, 2)
    while heard[-1] != 12:
        heard += await take(b, there)
    assert in_order_after("a", heard, 12)


async def test_several_refusals_and_then_acceptance_bring_all_in_order(nodes: Nodes) -> None:
    a, b = await nodes.pair()
    there = await subscriber(b)
    nodes.hub.full.add("b")
    for refusals in range(1, 5):
        await write(a, refusals)
        nodes.hub.sent.clear()
        await wait_until_async(lambda: nodes.hub.sent.count(("a", "b")) >= 2, 60)
    assert state(a).producers[0].lag(state(b).boot) == 4
    nodes.hub.heal()
    assert await take(b, there, 4) == [1, 2, 3, 4]


async def test_a_frame_that_is_too_big_to_arrive_is_cut(nodes: Nodes) -> None:
    a, b = await nodes.pair(call_timeout=0.3, batch_interval=1000.0)
    there = await subscriber(b)
    wire = Wire(nodes)
    wire.loses = lambda frame: isinstance(frame, Batch) and len(frame.records) > 200
    await write(a, *range(501))
    assert await take(b, there, 500) == list(range(500))
    assert max(len(batch.records) for batch in wire.batches()) > 200


async def test_a_hole_shows_on_an_idle_line(nodes: Nodes) -> None:
    # Its heartbeats come, with its write cursor; what it wrote doesn't.
    a, b = await nodes.pair(**IMPATIENT)
    there = await subscriber(b)
    wire = Wire(nodes)
    wire.loses = is_batch
    await write(a, 1, 2)
    assert await take(b, there) == ["a"]
    assert knows(a, b)
    wire.heal()
    await write(a, 3)
    assert await take(b, there) == [3]


async def test_order_is_per_producer_not_across_the_pool(nodes: Nodes) -> None:
    a, b = await nodes.pair(pool_size=2, call_timeout=0.3)
    there = await subscriber(b)
    keys: dict[int, str] = {}
    for key in "abcdefgh":
        before = state(a).sending.cursors()
        with EchoChannelLayer.sender(key):
            await write(a, 0, group="nobody")
        changed = [x != y for x, y in zip(before, state(a).sending.cursors(), strict=True)]
        keys[changed.index(True)] = key
    await settled(a)
    wire = Wire(nodes)
    wire.loses = lambda frame: isinstance(frame, Batch) and frame.index == 0
    for index in (0, 1):
        with EchoChannelLayer.sender(keys[index]):
            await write(a, index)
    assert await take(b, there) == [1]
    wire.heal()
    assert await take(b, there) == [0]


async def test_one_node_at_a_time_without_concurrent_flush(nodes: Nodes) -> None:
    layers = [nodes.make(name, concurrent_flush=False) for name in "abc"]
    await meet(*layers)
    a, b, c = layers
    there = [await subscriber(b), await subscriber(c)]
    for number in range(30):
        await write(a, number)
        await asyncio.sleep(0)
    assert await take(b, there[0], 30) == await take(c, there[1], 30) == list(range(30))
