"""Nodes that come, go, die, return, and miss each other: each on all three transports."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.layers import (
    IMPATIENT,
    Nodes,
    crash,
    knows,
    meet,
    nodes_on_each_transport,
    settled,
    state,
    subscriber,
    take,
    take_numbers,
    write,
)
from tests.wait import wait_until_async

__all__ = ["nodes_on_each_transport"]


@pytest.mark.parametrize("buffer_size", [100, 4])
async def test_a_node_that_was_forgotten_returns(nodes: Nodes, buffer_size: int) -> None:
    a, b = await nodes.pair(**IMPATIENT, buffer_size=buffer_size)
    there = await subscriber(b)
    await write(a, 0)
    assert await take(b, there) == [0]
    await settled(a)
    nodes.hub.cut_between("a", "b")
    await write(a, *range(1, 6))
    await wait_until_async(lambda: not knows(a, b), 60)
    assert await take(b, there) == ["a"]  # it has given a up as well
    nodes.hub.heal()
    await wait_until_async(lambda: knows(a, b), 30)
    if buffer_size == 100:
        assert await take(b, there, 5) == [1, 2, 3, 4, 5]
    await settled(a)
    await write(a, 6)
    heard = await take(b, there)
    assert heard == ([6] if buffer_size == 100 else ["a"])
    if buffer_size == 4:
        assert await take(b, there) == [6]


async def test_a_hears_b_and_b_does_not_hear_a(nodes: Nodes) -> None:
    a, b = await nodes.pair(**IMPATIENT)
    here, there = await subscriber(a), await subscriber(b)
    nodes.hub.cut.add(("a", "b"))
    await write(a, 1)
    assert (await take(a, here), await take(b, there)) == ([1], ["a"])
    await write(b, 2)  # which b can't send to one that it has given up
    nodes.hub.heal()
    await settled(a, b)
    await write(a, 3)
    await write(b, 4)
    heard = await take(b, there, 4)
    assert [n for n in heard if n in (1, 3)] == [1, 3]
    heard = await take_numbers(a, here, 3)
    assert [n for n in heard if n in (2, 4)] == [2, 4]


async def test_both_sides_restart_with_undelivered_writes(nodes: Nodes) -> None:
    a, b = nodes.make("a"), nodes.make("b")
    c = nodes.make("c")
    await meet(a, b, c)
    third = await subscriber(c)
    nodes.hub.cut_between("a", "b")
    await write(a, 1)
    await write(b, 2)
    assert sorted(await take(c, third, 2)) == [1, 2]
    await settled(c)
    crash(a)
    crash(b)
    nodes.hub.heal()
    a, b = nodes.make("a", capacity=1000), nodes.make("b", capacity=1000)
    await meet(a, b, c)
    here, there = await subscriber(a), await subscriber(b)
    await write(a, 10)
    await write(b, 20)
    heard = await take_numbers(c, third, 2)
    assert [n for n in heard if n in ("a", 10)] == ["a", 10]
    assert [n for n in heard if n in ("b", 20)] == ["b", 20]
    for layer, channel in ((a, here), (b, there)):  # which may have heard of each other's old life
        heard = await take_numbers(layer, channel, 2)
        assert sorted(n for n in heard if isinstance(n, int)) == [10, 20]


async def test_a_node_that_sends_one_message_and_leaves_alarms_nobody(nodes: Nodes) -> None:
    a, b = await nodes.pair()
    here, there = await subscriber(a), await subscriber(b)
    command = nodes.make("command")
    await write(command, 1)  # before it knows anybody
    await meet(a, b, command)
    await asyncio.to_thread(command._station.leave, 30.0)
    await write(a, 2)
    assert await take(a, here, 2) == await take(b, there, 2) == [1, 2]


async def test_who_missed_a_node_that_came_and_died_is_told(nodes: Nodes) -> None:
    a, b = await nodes.pair(**IMPATIENT)
    here, there = await subscriber(a), await subscriber(b)
    nodes.hub.cut_between("x", "b")
    x = nodes.make("x", **IMPATIENT)
    await meet(a, x)
    await write(x, 1)
    assert await take(a, here) == [1]
    assert state(x).boot not in state(b).receiver.sources
    crash(x)
    assert await take(a, here) == ["x"]
    assert await take(b, there) == ["x"]


# Links that seem to be well.


async def test_a_node_that_hears_nothing_makes_new_links(nodes: Nodes) -> None:
    a, b = await nodes.pair(call_timeout=0.3)
    there = await subscriber(b)
    nodes.hub.deaf |= {state(b).control, state(b).data}
    await write(a, 1)
    assert await take(b, there) == [1]
    assert state(b).control not in nodes.hub.deaf


async def test_a_drain_that_has_heard_nobody_is_no_drain(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echomq_app.layers.station.JOIN_TIMEOUT", 0.05)
    a, b = nodes.make("a"), nodes.make("b")
    there = await subscriber(b)
    nodes.hub.cut |= {("a", "a"), ("b", "a")}
    await write(a, 1)
    assert not await asyncio.to_thread(a._station.drain, 0.5)
    nodes.hub.heal()
    assert await asyncio.to_thread(a._station.drain, 30)
    assert await take(b, there) == [1]
