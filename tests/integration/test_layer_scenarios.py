"""The scenarios of EchoPubSub, each on all three transports, between nodes of one process.

Redis and the engine are real. What is cut, is cut where the receiving node's link hands
over what has come (`tests.layer_transport`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from echomq_app import signals
from echomq_app.core.echo import frames
from echomq_app.layers import EchoChannelLayer
from echomq_app.layers.links import Links
from tests.integration.layers import (
    Nodes,
    crash,
    failed,
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


@pytest.fixture
def heard_signals() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Give all signals of the layer as they come."""
    found: list[tuple[str, dict[str, Any]]] = []
    receivers = []
    for name in (
        "buffer_flush",
        "buffer_expired",
        "buffer_capacity_warning",
        "sync_failure",
        "retry_scheduled",
        "node_joined",
        "node_forgotten",
        "cursor_expired",
    ):

        def hear(sender: object, name: str = name, **details: Any) -> None:
            details.pop("signal")
            found.append((name, details))

        getattr(signals, name).connect(hear)
        receivers.append((name, hear))
    yield found
    for name, hear in receivers:
        getattr(signals, name).disconnect(hear)


def reset(layer: EchoChannelLayer) -> Callable[[], Coroutine[Any, Any, None]]:
    """Give up the links of a node, which makes new ones."""

    async def do() -> None:
        layer._station.links.reset()

    return do


async def test_a_message_reaches_both_nodes_once_and_in_order(nodes: Nodes) -> None:
    a, b = await nodes.pair()
    here, there = await subscriber(a), await subscriber(b)
    await write(a, *range(300))
    assert await take(a, here, 300) == await take(b, there, 300) == list(range(300))
    await write(b, -1)
    assert (await take(a, here), await take(b, there)) == ([-1], [-1])


async def test_a_new_node_joins_mid_stream_without_history(nodes: Nodes) -> None:
    a = nodes.make("a")
    await write(a, *range(10))
    await a._station.joined()
    c = nodes.make("c")
    there = await subscriber(c)
    await meet(a, c)
    await write(a, 10, 11)
    assert [n for n in await take(c, there, 2) if n != "a"] in ([10, 11], [10])
    assert state(a).producers[0].ring.write_cursor == 12


async def test_a_brief_disconnect_is_replayed_in_order_before_what_follows(nodes: Nodes) -> None:
    a, b = await nodes.pair(call_timeout=0.3)
    there = await subscriber(b)
    await write(a, 1)
    assert await take(b, there) == [1]
    nodes.hub.cut_between("a", "b")
    await write(a, 2, 3)
    await failed(a)
    nodes.hub.heal()
    await write(a, 4)
    assert await take(b, there, 3) == [2, 3, 4]


async def test_a_node_that_falls_too_far_behind_is_told_exactly_once(
    nodes: Nodes, heard_signals: list[tuple[str, dict[str, Any]]]
) -> None:
    a, b = await nodes.pair(call_timeout=0.3, buffer_size=4)
    there = await subscriber(b)
    await write(a, 0, 1, 2)
    assert await take(b, there, 3) == [0, 1, 2]
    await settled(a)
    nodes.hub.cut_between("a", "b")
    await write(a, 3, 4, 5, 6, 7)  # the worked example: m3 is overwritten by m7
    await failed(a)
    nodes.hub.heal()
    await settled(a)
    await write(a, 8)
    assert await take(b, there, 2) == ["a", 8]
    await write(a, 9)
    assert await take(b, there) == [9]
    names = [name for name, _ in heard_signals]
    assert {"buffer_flush", "buffer_expired", "sync_failure", "retry_scheduled"} <= set(names)
    assert [details for name, details in heard_signals if name == "cursor_expired"] == [
        {"node": "a", "missed": 5, "channels": 1}
    ]


async def test_a_receiver_that_comes_back_with_other_links_goes_on_where_it_was(
    nodes: Nodes,
) -> None:
    # The remote worker crashes; its subscribers and what it expects survive.
    a, b = await nodes.pair(call_timeout=0.3)
    there = await subscriber(b)
    await write(a, 1)
    assert await take(b, there) == [1]
    await b._station.on_engine(reset(b))
    await write(a, 2, 3)
    assert await take(b, there, 2) == [2, 3]


async def test_a_sender_that_comes_back_with_other_links_goes_on_where_it_was(
    nodes: Nodes,
) -> None:
    a, b = await nodes.pair(call_timeout=0.5)
    there = await subscriber(b)
    nodes.hub.cut.add(("a", "b"))
    await write(a, 1)
    await wait_until_async(lambda: nodes.hub.sent.count(("a", "b")) > 0, 30)
    old = state(a).control
    await a._station.on_engine(reset(a))
    await wait_until_async(lambda: state(a).control != old and a._station.links.ready, 30)
    nodes.hub.heal()
    assert await take(b, there) == [1]
    await settled(a)


def test_a_frame_that_is_sent_again_over_new_links_says_where_the_ack_should_go_now() -> None:
    transport = {"BACKEND": "channels.layers.InMemoryChannelLayer"}
    links = Links(transport, timeout=1.0, take=lambda wire: None, on_link=lambda: None)
    batches = [
        frames.Batch(boot="a", name="a", control=control, index=0, base=0, records=[("g", b"1")])
        for control in ("old", "new")
    ]
    assert [frames.decode(links._encode(batch)) for batch in batches] == batches
    assert links._encode(batches[1]) is links._encode(batches[1])  # once for all nodes


async def test_an_ack_that_is_lost_brings_nothing_twice(nodes: Nodes) -> None:
    a, b = await nodes.pair(call_timeout=0.3)
    there = await subscriber(b)
    nodes.hub.cut.add(("b", "a"))
    await write(a, 1)
    assert await take(b, there) == [1]
    await failed(a)
    assert state(a).producers[0].lag(state(b).boot) == 1  # it was delivered, for all we know
    nodes.hub.heal()
    await write(a, 2)
    assert await take(b, there) == [2]


async def test_a_producer_that_restarts_is_told_of_to_everybody(nodes: Nodes) -> None:
    a, b = await nodes.pair()
    there = await subscriber(b)
    await write(a, 1)
    assert await take(b, there) == [1]
    crash(a)
    a = nodes.make("a", capacity=1000)  # another life of the same node
    await write(a, 100)
    assert await take(b, there, 2) == ["a", 100]


async def test_a_producer_that_leaves_cleanly_and_returns_is_silent(nodes: Nodes) -> None:
    a, b = await nodes.pair()
    there = await subscriber(b)
    await write(a, 1)
    await asyncio.to_thread(a._station.leave, 10.0)
    await write(a, 2)
    assert await take(b, there, 2) == [1, 2]


async def test_failed_sends_leave_the_cursor_and_are_retried(nodes: Nodes) -> None:
    a, b = await nodes.pair()
    there = await subscriber(b)
    nodes.hub.full.add("b")  # the transport refuses: ChannelFull
    await write(a, 1, 2)
    await failed(a)
    assert state(a).producers[0].lag(state(b).boot) == 2
    nodes.hub.heal()
    assert await take(b, there, 2) == [1, 2]


async def test_a_transport_that_takes_longer_than_an_ack_may_brings_all(nodes: Nodes) -> None:
    # To cut such a send short would be to send the same for ever, over new connections.
    a, b = await nodes.pair(call_timeout=0.1)
    there = await subscriber(b)
    nodes.hub.slow = 0.4
    await write(a, *range(20))
    assert await take(b, there, 20) == list(range(20))
    nodes.hub.heal()


async def test_a_hung_node_holds_up_nobody(nodes: Nodes) -> None:
    a, b = await nodes.pair(call_timeout=20.0)
    c = nodes.make("c", call_timeout=20.0)
    await meet(a, b, c)
    there, hung = await subscriber(b), await subscriber(c)
    nodes.hub.hangs.add(("a", "c"))
    await write(a, *range(50))
    assert await take(b, there, 50) == list(range(50))
    assert state(a).producers[0].lag(state(c).boot) == 50
    assert hung


async def test_a_pool_keeps_each_senders_order(nodes: Nodes) -> None:
    a, b = await nodes.pair(pool_size=4)
    there = await subscriber(b)
    keys = [f"acct:{number}" for number in range(6)]
    for number in range(30):
        for key in keys:
            with EchoChannelLayer.sender(key):
                await b.group_send("nobody", {"type": "test.message"})
                await a.group_send("g", {"type": "test.message", "n": [key, number]})
    heard = await take(b, there, 180)
    for key in keys:
        assert [number for sender, number in heard if sender == key] == list(range(30))
    used = [producer.ring.write_cursor for producer in state(a).producers]
    assert sum(1 for cursor in used if cursor) > 1


async def test_nodes_with_different_pool_sizes_hear_each_other_whole(nodes: Nodes) -> None:
    a, b = nodes.make("a", pool_size=3), nodes.make("b", pool_size=1)
    await meet(a, b)
    here, there = await subscriber(a), await subscriber(b)
    for number in range(20):
        with EchoChannelLayer.sender(str(number)):
            await write(a, number)
            await write(b, 100 + number)
    assert sorted(await take(a, here, 40)) == sorted(await take(b, there, 40))


async def test_a_handler_that_dedupes_sees_each_event_once(nodes: Nodes) -> None:
    from echomq_app.dedupe import Seen

    a, b = await nodes.pair()
    there = await subscriber(b)
    await write(a, 1, 2, 2, 3, 1)  # a sender that repeats itself: no layer can help that
    seen = Seen(max_size=100)
    assert [n for n in await take(b, there, 5) if seen.first(n)] == [1, 2, 3]


async def test_a_group_that_is_named_by_a_text_of_another_class(nodes: Nodes) -> None:
    class Name(str):
        pass

    a, b = await nodes.pair()
    there = await subscriber(b, Name("g"))
    await write(a, 1, group=Name("g"))
    await write(a, 2)
    assert await take(b, there, 2) == [1, 2]


async def test_a_send_to_a_channel_of_another_node(nodes: Nodes) -> None:
    a, b = await nodes.pair()
    there = await b.new_channel()
    await a.send(there, {"type": "test.message", "n": 7})
    assert await take(b, there) == [7]


async def test_channels_of_no_node_pass_through_the_transport(nodes: Nodes) -> None:
    a, b = await nodes.pair()
    if nodes.kind == "pubsub":  # it delivers to those who are there already
        waiting = asyncio.create_task(b.receive("thumbnails"))
        layer = b._station.links.data.layer
        await wait_until_async(lambda: _subscribed(layer, "thumbnails"), 30)
    else:
        waiting = asyncio.create_task(b.receive("thumbnails"))
    await a.send("thumbnails", {"type": "make", "n": 1})
    message = await asyncio.wait_for(waiting, 30)
    assert (message["type"], message["n"]) == ("make", 1)


def _subscribed(layer: Any, channel: str) -> bool:
    return any(
        channel in shard._subscribed_to
        for loop_layer in layer._layers.values()
        for shard in loop_layer._shards
    )


async def test_a_capacity_warning_comes_once(
    nodes: Nodes, heard_signals: list[tuple[str, dict[str, Any]]]
) -> None:
    a, _ = await nodes.pair(buffer_size=10, call_timeout=20.0)
    nodes.hub.cut_between("a", "b")
    await write(a, *range(5))

    def warnings() -> list[dict[str, Any]]:
        return [details for name, details in heard_signals if name == "buffer_capacity_warning"]

    await wait_until_async(warnings, 30)
    await write(a, *range(5))
    await asyncio.sleep(0.3)
    (warning,) = warnings()
    assert warning in (  # it may look between two writes
        {"fill": 0.4, "used": 4, "buffer_size": 10},
        {"fill": 0.5, "used": 5, "buffer_size": 10},
    )
