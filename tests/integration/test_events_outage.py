"""The lossy feed in bad weather: it comes back by itself, and says that it was away.

Redis is stopped in the test's own thread: it dies with the thread that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from channels.layers import channel_layers as layer_manager

from echomq_app import engine, events, signals
from echomq_app.core.ids import new_job_id
from echomq_app.core.names import events_group
from echomq_app.core.numbering import SenderNumbers
from echomq_app.engine.process import engine as the_engine
from echomq_app.engine.resubscribe import GroupListener
from echomq_app.engine.switchboard import Switchboard
from tests.layers import CORE, PUBSUB, channel_layers, hung_server, use_layers
from tests.servers import Redis
from tests.wait import wait_until

JOB = new_job_id()
GAP = events.Gap(reason="reconnect")
brokers = pytest.mark.parametrize("backend", [CORE, PUBSUB])

# When a pub/sub connection breaks while a command is written, redis-py's reader and its
# writer connect again at the same time, and one of the two sockets is left to the
# garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)


@pytest.fixture(autouse=True)
def complaints_come_here() -> Iterator[None]:
    """Let the collector complain in the test that is meant, not in a later one."""
    yield
    gc.collect()


async def take(feed: events.Feed, count: int = 1) -> list[Any]:
    return [await asyncio.wait_for(anext(feed), 20) for _ in range(count)]


async def hears_again(feed: events.Feed, queue: str = "emails") -> list[Any]:
    """Publish until an event comes through; return all items up to that one."""
    number = 0
    items: list[Any] = []
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        number += 1
        events.publish(queue, "progress", JOB, number)
        with contextlib.suppress(TimeoutError):
            items.append(await asyncio.wait_for(anext(feed), 0.05))
            while not isinstance(items[-1], events.Event):
                items.append(await asyncio.wait_for(anext(feed), 0.05))
            return items
    raise AssertionError("no event came through in 30 s")


def settle(feed: events.Feed) -> None:
    """Wait until all that was published has come, and throw it away."""
    assert engine.flush(20)
    wait_until(lambda: not the_engine._broker.pending)
    time.sleep(0.05)
    feed._items.clear()


# Restart, empty (channels_redis#406, redis-py#764): the core layer alone stays deaf for
# ever, pub/sub comes back without a word.


@brokers
async def test_after_each_restart_one_gap_and_then_events(
    backend: str, make_redis: Callable[..., Redis]
) -> None:
    server = make_redis(tcp=True)
    with use_layers(channel_layers(backend, server.url)):
        async with events.listen("emails", "other") as feed:
            for _ in range(4):
                server.restart_empty()
                items = await hears_again(feed)
                assert items[0] == GAP
                assert [type(item) for item in items].count(events.Gap) == 1
                settle(feed)
                # The other group was joined again too, without anybody asking.
                events.publish("other", "started", JOB)
                assert [item.queue for item in await take(feed)] == ["other"]


@brokers
async def test_a_longer_outage_is_one_gap(backend: str, make_redis: Callable[..., Redis]) -> None:
    server = make_redis(tcp=True)
    with use_layers(channel_layers(backend, server.url)):
        async with events.listen("emails") as feed:
            server.stop()
            await asyncio.sleep(1.5)  # several attempts to connect fail meanwhile
            server.restart_empty()
            items = await hears_again(feed)

    assert items[0] == GAP
    assert [type(item) for item in items].count(events.Gap) == 1


@brokers
async def test_every_feed_and_every_waiter_hears_of_it(
    backend: str, make_redis: Callable[..., Redis]
) -> None:
    server = make_redis(tcp=True)
    with use_layers(channel_layers(backend, server.url)), engine.waiter("w") as waiter:
        async with events.listen("emails") as one, events.listen("other") as two:
            assert await waiter.wait_async(20)
            waiter.clear()
            server.restart_empty()

            assert await take(one) == [GAP]
            assert await take(two) == [GAP]
            assert await waiter.wait_async(20)


@brokers
async def test_what_was_published_before_a_restart_comes_before_the_gap(
    backend: str, make_redis: Callable[..., Redis]
) -> None:
    server = make_redis(tcp=True)
    with use_layers(channel_layers(backend, server.url)):
        async with events.listen("emails") as feed:
            events.publish("emails", "progress", JOB, "before")
            assert engine.flush(20)
            wait_until(lambda: len(feed._items) == 1)
            server.restart_empty()
            before, gap = await take(feed, 2)

    assert before.data == "before"
    assert gap == GAP


async def test_a_message_of_a_link_that_has_broken_is_not_let_through() -> None:
    # pub/sub subscribes again by itself, so messages may come between the reconnect and
    # the gap. Here they certainly do.
    class Link:
        broken = ""
        layer: Any = None

        async def receive(self, channel: str) -> dict[str, Any]:
            if left:
                return left.pop(0)
            raise ConnectionResetError("the end")

        def link_is_new(self) -> None:
            raise AssertionError("no timeout here")

    class Ear:
        def __init__(self) -> None:
            self.heard: list[Any] = []

        def deliver(self, message: Any) -> None:
            self.heard.append(message["number"])
            link.broken = "the layer had to connect again"

        def gap(self, reason: str) -> None:
            self.heard.append(reason)

    left = [message(1), message(2)]
    link: Any = Link()
    link.layer = link
    switchboard, ear, group = Switchboard(), Ear(), events_group("emails")
    switchboard.add(group, ear)
    listener = GroupListener(switchboard, "us", lambda: True)
    listener._numbers[group] = SenderNumbers()

    with pytest.raises(ConnectionResetError):
        await listener._receive(link, "channel")

    assert ear.heard == [1]
    assert left == []


# Broken connections, more often than any retry budget (redis-py#1464, solid_cable#74).


@brokers
async def test_killing_the_connections_a_hundred_times(
    backend: str, redis_url: str, redis_server: Redis
) -> None:
    with use_layers(channel_layers(backend, redis_url)), redis_server.client() as client:
        async with events.listen("emails") as feed:
            for _ in range(100):
                kill_others(client)
                await asyncio.sleep(0.01)
            items = await hears_again(feed)

    # However often it broke, one unread gap says it. What was broken when that was read says
    # so once more: the link, and after it each reader that the layer had connected again.
    assert items[0] == GAP
    assert len(items) <= 6


@brokers
async def test_subscribe_unsubscribe_subscribe_and_then_the_link_breaks(
    backend: str, redis_url: str, redis_server: Redis
) -> None:
    with use_layers(channel_layers(backend, redis_url)), redis_server.client() as client:
        async with events.listen("base") as feed:
            for _ in range(3):
                await feed.subscribe("emails", "gone")
                await feed.unsubscribe("emails", "gone")
            await feed.subscribe("emails")
            kill_others(client)
            assert await take(feed) == [GAP]

            assert isinstance((await hears_again(feed, "emails"))[-1], events.Event)
            settle(feed)
            assert isinstance((await hears_again(feed, "base"))[-1], events.Event)
            settle(feed)
            # What was left isn't joined again.
            layer: Any = layer_manager.make_backend("default")
            await layer.group_send(
                events_group("gone"),
                {
                    "type": "echomq.events",
                    "group": events_group("gone"),
                    "queue": "gone",
                    "events": [],
                },
            )
            if backend == CORE:
                assert client.zcard(f"asgi:group:{events_group('gone')}") == 0
            else:
                channel = f"asgi__group__{events_group('gone')}"
                assert client.pubsub_numsub(channel) == [(channel.encode(), 0)]
            await (layer.close_pools() if backend == CORE else layer.flush())


def kill_others(client: Any) -> None:
    for connection in client.client_list():
        if int(connection["id"]) != client.client_id():
            with contextlib.suppress(Exception):
                client.client_kill_filter(_id=connection["id"])


async def test_dead_channels_do_not_pile_up_in_the_groups_of_the_core_layer(
    redis_url: str, redis_server: Redis
) -> None:
    with use_layers(channel_layers(CORE, redis_url)), redis_server.client() as client:
        async with events.listen("emails") as feed:
            for _ in range(10):
                kill_others(client)
                assert await take(feed) == [GAP]
            key = f"asgi:group:{events_group('emails')}"
            wait_until(lambda: client.zcard(key) == 1)


@brokers
async def test_one_of_two_hosts_restarts_empty(
    backend: str, make_redis: Callable[..., Redis]
) -> None:
    # The groups are spread over the hosts; the channel that receives is on one of them.
    servers = [make_redis(tcp=True), make_redis(tcp=True)]
    layers = channel_layers(backend, hosts=[server.url for server in servers])
    queues = [f"q{number}" for number in range(8)]
    with use_layers(layers, RESUBSCRIBE_INTERVAL=0.3):
        async with events.listen(*queues) as feed:
            for server in servers:
                server.restart_empty()
                assert await take(feed) == [GAP]
                for queue in queues:
                    await hears_again(feed, queue)
                    settle(feed)


# A broker that loses its memory, or its voice, but no connection.


@brokers
async def test_a_broker_that_forgot_the_groups_is_found_by_a_probe(
    backend: str, redis_url: str, redis_server: Redis
) -> None:
    settings = {"RESUBSCRIBE_INTERVAL": 0.2, "BROKER_TIMEOUT": 0.5}
    with use_layers(channel_layers(backend, redis_url), **settings):
        async with events.listen("emails") as feed:
            redis_server.flush()  # on core all groups are gone; pub/sub has nothing to lose
            if backend == CORE:
                assert await take(feed) == [GAP]
            items = await hears_again(feed)

    assert [type(item) for item in items] == [events.Event]


@brokers
async def test_a_broker_that_hangs_and_goes_on_is_a_gap(
    backend: str, make_redis: Callable[..., Redis]
) -> None:
    server = make_redis(tcp=True)
    settings = {"RESUBSCRIBE_INTERVAL": 0.2, "BROKER_TIMEOUT": 0.3}
    with use_layers(channel_layers(backend, server.url), **settings):
        async with events.listen("emails") as feed:
            server.pause()
            try:
                # Well beyond the probe and its timeout: the link is given up.
                await asyncio.sleep(1.5)
            finally:
                server.resume()
            items = await hears_again(feed)

    assert items[0] == GAP
    assert [type(item) for item in items].count(events.Gap) == 1


@pytest.mark.parametrize(
    ("backend", "option"),
    [(CORE, ""), (CORE, "?socket_timeout=0.3"), (PUBSUB, "?socket_timeout=0.3")],
)
async def test_an_idle_link_is_no_gap(
    backend: str, option: str, make_redis: Callable[..., Redis]
) -> None:
    # redis-py 8 gives up on a silent socket after 5 s, the very time that the core layer
    # blocks for; an option in the URL beats the one that we pass.
    server = make_redis(tcp=True)
    wait = 1.5 if option else 6.0
    with use_layers(channel_layers(backend, server.url + option), RESUBSCRIBE_INTERVAL=0.5):
        async with events.listen("emails") as feed:
            await asyncio.sleep(wait)
            events.publish("emails", "started", JOB)
            [item] = await take(feed)

    assert isinstance(item, events.Event)


async def test_membership_outlives_the_layer_s_expiry_of_groups(
    redis_url: str, redis_server: Redis
) -> None:
    # channels#1371: after group_expiry (a day) the core layer forgets its members.
    layers = channel_layers(CORE, redis_url, group_expiry=1)
    with use_layers(layers, RESUBSCRIBE_INTERVAL=0.3), redis_server.client() as client:
        async with events.listen("emails") as feed:
            await asyncio.sleep(3)
            assert client.zcard(f"asgi:group:{events_group('emails')}") == 1
            events.publish("emails", "started", JOB)
            [item] = await take(feed)

    assert isinstance(item, events.Event)


@brokers
async def test_a_feed_may_be_opened_while_the_broker_is_down(
    backend: str, make_redis: Callable[..., Redis], caplog: pytest.LogCaptureFixture
) -> None:
    server = make_redis(tcp=True)
    server.stop()
    with use_layers(channel_layers(backend, server.url), BROKER_TIMEOUT=0.5):
        async with events.listen("emails") as feed:
            assert "event=listen_without_broker queues=emails" in caplog.text
            server.restart_empty()
            items = await hears_again(feed)

    # It was promised everything from the moment that it was opened.
    assert isinstance(items[0], events.Gap)
    assert [type(item) for item in items].count(events.Gap) == 1


@brokers
async def test_a_feed_that_waited_for_the_broker_begins_without_a_gap(
    backend: str, make_redis: Callable[..., Redis]
) -> None:
    server = make_redis(tcp=True)
    server.stop()
    with use_layers(channel_layers(backend, server.url), BROKER_TIMEOUT=20):
        feed = events.listen("emails")
        entering = asyncio.create_task(feed.__aenter__())
        await asyncio.sleep(0.3)
        server.restart_empty()
        await asyncio.wait_for(entering, 20)  # nothing was promised before this
        items = await hears_again(feed)
        await feed.__aexit__(None, None, None)

    assert [type(item) for item in items] == [events.Event]


async def test_a_feed_that_was_joined_too_late_is_told_when_it_is(redis_url: str) -> None:
    with use_layers(channel_layers(PUBSUB, redis_url), BROKER_TIMEOUT=0.3):
        async with events.listen("base"):  # the link is up, and stays up
            feed = events.listen("emails")
            with engine_stands_still():
                await feed.__aenter__()
            assert await take(feed) == [events.Gap(reason="joined late")]
            events.publish("emails", "started", JOB)
            assert isinstance((await take(feed))[0], events.Event)
            await feed.__aexit__(None, None, None)


async def test_listening_to_a_hung_broker_ends_when_asked() -> None:
    with hung_server() as url, use_layers(channel_layers(PUBSUB, url), BROKER_TIMEOUT=0.3):
        async with events.listen("emails") as feed:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(feed), 0.1)


# Messages that the broker or the sender loses in silence.


@contextlib.contextmanager
def engine_stands_still() -> Iterator[None]:
    """Keep the engine's loop from running: nobody receives."""
    go_on, stands = threading.Event(), threading.Event()

    async def stand() -> None:
        stands.set()
        go_on.wait(30)

    future = engine.submit(stand)
    assert stands.wait(10)
    try:
        yield
    finally:
        go_on.set()
        future.result(10)


def message(number: int, sender: str = "another process") -> dict[str, Any]:
    return {
        "type": "echomq.events",
        "group": events_group("emails"),
        "queue": "emails",
        "sender": sender,
        "number": number,
        "events": [{"event": "progress", "job_id": str(JOB), "data": str(number)}],
    }


def short(items: list[Any]) -> list[Any]:
    return [item.data if isinstance(item, events.Event) else item.reason for item in items]


async def test_a_burst_beyond_the_capacity_shows_as_a_gap(redis_url: str) -> None:
    # channels_redis#131: the core layer drops what exceeds the capacity, with no error.
    with use_layers(channel_layers(CORE, redis_url, capacity=5)):
        layer: Any = layer_manager.make_backend("default")
        async with events.listen("emails") as feed:
            with engine_stands_still():
                for number in range(10):
                    await layer.group_send(events_group("emails"), message(number))
            first = await take(feed, 2)
            wait_until(lambda: len(feed._items) + 2 >= 5)
            await layer.group_send(events_group("emails"), message(10))
            rest = [*first]
            while rest[-1] != events.Event(queue="emails", event="progress", job_id=JOB, data=10):
                rest += await take(feed)
        await layer.close_pools()

    got = short(rest)
    assert got[-2:] == ["lost", 10]
    assert got[:-2] == list(range(len(got) - 2))
    assert len(got) < 11


@brokers
async def test_holes_and_repeats_of_each_sender_by_itself(backend: str, redis_url: str) -> None:
    with use_layers(channel_layers(backend, redis_url)):
        layer: Any = layer_manager.make_backend("default")
        async with events.listen("emails") as feed:
            for number, sender in [(5, "a"), (6, "a"), (0, "b"), (6, "a"), (9, "a"), (1, "b")]:
                await layer.group_send(events_group("emails"), message(number, sender))
            got = await take(feed, 6)
            await (layer.close_pools() if backend == CORE else layer.flush())

    assert short(got) == [5, 6, 0, "lost", 9, 1]


async def test_leaving_and_joining_again_is_no_hole(redis_url: str) -> None:
    with use_layers(channel_layers(CORE, redis_url)):
        layer: Any = layer_manager.make_backend("default")
        async with events.listen("base", "emails") as feed:
            await layer.group_send(events_group("emails"), message(1))
            await take(feed)
            await feed.unsubscribe("emails")
            await feed.subscribe("base2")  # returns when the leaving was done as well
            await layer.group_send(events_group("emails"), message(2))
            await feed.subscribe("emails")
            await layer.group_send(events_group("emails"), message(3))
            got = await take(feed)
        await layer.close_pools()

    assert short(got) == [3]


@brokers
async def test_readers_learn_that_the_publisher_s_backlog_was_full(
    backend: str, make_redis: Callable[..., Redis]
) -> None:
    server = make_redis(tcp=True)
    told: list[int] = []

    def receive(**kwargs: Any) -> None:
        told.append(kwargs["count"])

    settings = {"PUBLISH_BACKLOG": 5, "BROKER_TIMEOUT": 20}
    signals.publish_failed.connect(receive)
    try:
        with use_layers(channel_layers(backend, server.url), **settings):
            async with events.listen("emails") as feed:
                events.publish("emails", "progress", JOB, "first")
                assert short(await take(feed)) == ["first"]
                server.pause()
                try:
                    for number in range(10):
                        events.publish("emails", "progress", JOB, number)
                finally:
                    server.resume()
                assert engine.flush(20)
                events.publish("emails", "progress", JOB, "last")
                got: list[Any] = []
                while not got or got[-1] != "last":
                    got += short(await take(feed))
    finally:
        signals.publish_failed.disconnect(receive)

    assert got == [0, 1, 2, 3, 4, "lost", "last"]
    assert sum(told) == 5
