"""The lossy feed in good weather: what is published arrives, in order, or says why not."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from channels.consumer import AsyncConsumer
from channels.layers import channel_layers as layer_manager
from channels.layers import get_channel_layer
from channels.testing import ApplicationCommunicator
from django.db import transaction

from echomq_app import engine, events
from echomq_app.core.ids import EventId, JobId, new_job_id
from echomq_app.core.names import events_group
from echomq_app.engine.process import engine as the_engine
from echomq_app.exceptions import InvalidName, InvalidPayload, WrongBrand
from tests.layers import (
    CORE,
    ECHO,
    IN_MEMORY,
    PUBSUB,
    Layers,
    channel_layers,
    echo_layers,
    hung_server,
    run_program,
    use_layers,
)
from tests.servers import Redis

JOB = new_job_id()
brokers = pytest.mark.parametrize("backend", [CORE, PUBSUB])


OVER = {"echo over core": CORE, "echo over pubsub": PUBSUB}


@pytest.fixture(params=["none", IN_MEMORY, ECHO, CORE, PUBSUB, *OVER])
def layers(request: pytest.FixtureRequest) -> Layers:
    """Each way in which messages may travel."""
    if request.param == "none":
        return {}
    if request.param in (IN_MEMORY, ECHO):
        return channel_layers(request.param)
    url = request.getfixturevalue("redis_url")
    if request.param in OVER:
        return echo_layers(OVER[request.param], url)
    return channel_layers(request.param, url)


async def take(feed: events.Feed, count: int) -> list[Any]:
    """Read `count` items, or fail after ten seconds without one."""
    return [await asyncio.wait_for(anext(feed), 10) for _ in range(count)]


async def nothing_more(feed: events.Feed, queue: str) -> list[Any]:
    """Return what else was on its way: all before a last event of our own."""
    last = new_job_id()
    events.publish(queue, "fence", last)
    items: list[Any] = []
    while True:
        [item] = await take(feed, 1)
        if isinstance(item, events.Event) and item.job_id == last:
            return items
        items.append(item)


# Delivery, on every layer.


async def test_what_is_published_arrives_in_order_and_whole(layers: Layers) -> None:
    with use_layers(layers):
        async with events.listen("emails", "other") as feed:
            for number in range(200):
                events.publish("emails", "progress", JOB, {"n": number})
            await events.apublish("other", "completed", str(JOB))
            got = await take(feed, 201)

    emails = [item for item in got if item.queue == "emails"]
    assert [item.data["n"] for item in emails] == list(range(200))
    assert events.Event(queue="other", event="completed", job_id=JOB, data=None) in got


async def test_several_events_in_one_call_are_yielded_one_by_one(layers: Layers) -> None:
    with use_layers(layers):
        async with events.listen("emails") as feed:
            events.publish_many(
                "emails",
                [
                    ("started", JOB),
                    ("progress", str(JOB), {"n": 1}),
                    events.Event(queue="emails", event="completed", job_id=JOB, data=[2]),
                ],
            )
            await events.apublish_many("emails", (("progress", JOB, n) for n in range(3)))
            got = await take(feed, 6)

    assert [(item.event, item.data) for item in got] == [
        ("started", None),
        ("progress", {"n": 1}),
        ("completed", [2]),
        ("progress", 0),
        ("progress", 1),
        ("progress", 2),
    ]


async def test_every_listener_of_a_queue_hears_it_and_no_other_queue_s(layers: Layers) -> None:
    with use_layers(layers):
        async with (
            events.listen("emails") as one,
            events.listen("emails") as two,
            events.listen("other") as other,
        ):
            events.publish("emails", "started", JOB)
            assert [item.event for item in await take(one, 1)] == ["started"]
            assert [item.event for item in await take(two, 1)] == ["started"]
            assert await nothing_more(other, "other") == []
            assert await nothing_more(one, "emails") == []


async def test_publishing_from_threads_and_from_async_to_sync_in_threads(layers: Layers) -> None:
    # channels_redis#332, #312: a new event loop, and connections, for each call.
    def publish(number: int) -> None:
        events.publish("emails", "progress", JOB, number)

    def publish_async(number: int) -> None:
        async_to_sync(events.apublish)("emails", "progress", JOB, number)

    with use_layers(layers):
        async with events.listen("emails") as feed:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                for number in range(100):
                    pool.submit(publish if number % 2 else publish_async, number)
                await sync_to_async(publish)(100)
                got = await take(feed, 101)

    assert sorted(item.data for item in got) == list(range(101))


async def test_nobody_listening_is_success(layers: Layers) -> None:
    with use_layers(layers):
        receivers = events.publish("emails", "started", JOB)
        many = await events.apublish_many("emails", [("started", JOB)])
        assert await asyncio.to_thread(engine.flush, 10)

    # A broker doesn't tell how many heard it; in this process we know.
    expected = None if "hosts" in str(layers) else 0
    assert receivers == expected
    assert many == expected


@pytest.mark.parametrize("backend", [IN_MEMORY, ECHO])
async def test_the_receivers_in_this_process_are_counted_when_there_is_no_broker(
    backend: str,
) -> None:
    with use_layers(channel_layers(backend)):
        layer: Any = get_channel_layer()
        async with events.listen("emails"), events.listen("emails"):
            await layer.group_add(events_group("emails"), await layer.new_channel())
            assert events.publish("emails", "started", JOB) == 3


async def test_no_events_are_no_message(redis_url: str) -> None:
    with use_layers(channel_layers(CORE, redis_url)):
        assert events.publish_many("emails", []) == 0
        assert not the_engine._thread.running


async def test_data_is_fixed_when_it_is_published(layers: Layers) -> None:
    data = {"n": [1]}
    with use_layers(layers):
        async with events.listen("emails") as feed:
            events.publish("emails", "progress", JOB, data)
            data["n"].append(2)
            [item] = await take(feed, 1)

    assert item.data == {"n": [1]}


# What is refused, before any I/O.


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("a b", "started", JOB), InvalidName),
        (("q" * 71, "started", JOB), InvalidName),
        (("emails", "", JOB), InvalidName),
        (("emails", "started", EventId.from_int(5)), WrongBrand),
        (("emails", "started", "not an id"), WrongBrand),
        (("emails", "started", None), WrongBrand),
        (("emails", "started", JOB, float("nan")), InvalidPayload),
        (("emails", "started", JOB, "\0"), InvalidPayload),
        (("emails", "started", JOB, "\ud800"), InvalidPayload),
        (("emails", "started", JOB, "x" * 20_000_000), InvalidPayload),
    ],
)
@pytest.mark.parametrize("how", ["publish", "apublish", "many", "on_commit"])
def test_wrong_arguments_are_refused_before_any_io(
    how: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "publish": lambda: events.publish(*arguments),
        "apublish": lambda: asyncio.run(events.apublish(*arguments)),
        "many": lambda: events.publish_many(
            arguments[0],
            [("started", JOB), arguments[1:]],
        ),
        "on_commit": lambda: events.publish_on_commit(*arguments),
    }
    with hung_server() as url, use_layers(channel_layers(CORE, url)):
        with pytest.raises(error):
            calls[how]()
        assert not the_engine._thread.running  # nothing was sent, not even in part


def test_an_event_of_another_queue_and_a_wrong_shape_are_refused() -> None:
    other = events.Event(queue="other", event="started", job_id=JOB)
    with use_layers({}):
        with pytest.raises(ValueError, match="other"):
            events.publish_many("emails", [other])
        with pytest.raises(ValueError, match="event, job_id, data"):
            events.publish_many("emails", [("a", JOB, 1, 2)])  # type: ignore[list-item]
        with pytest.raises(InvalidName):
            events.listen("a b")
        with pytest.raises(ValueError, match="at least 1"):
            events.listen("emails", buffer=0)


# Transactions (channels#362: publish before commit, publish after a rollback).


@contextlib.contextmanager
def rolled_back() -> Iterator[None]:
    with transaction.atomic():
        yield
        transaction.set_rollback(True)


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_nobody_hears_of_a_transaction_before_it_commits_nor_if_it_rolls_back() -> None:
    feed = events.listen("emails")

    def heard() -> list[Any]:
        return [item.data for item in feed._items if isinstance(item, events.Event)]

    with use_layers({}):
        async_to_sync(feed.__aenter__)()
        with transaction.atomic():
            events.publish_on_commit("emails", "started", JOB, 1)
            with rolled_back():
                events.publish_on_commit("emails", "started", JOB, "savepoint")
            with transaction.atomic(using="other"):
                events.publish_on_commit("emails", "started", JOB, "other", using="other")
            assert heard() == ["other"]
        assert heard() == ["other", 1]

        with rolled_back():
            events.publish_on_commit("emails", "started", JOB, "rolled back")
        assert heard() == ["other", 1]

        events.publish_on_commit("emails", "started", JOB, "no transaction")
        assert heard() == ["other", 1, "no transaction"]
        async_to_sync(feed.__aexit__)(None, None, None)


# The feed as an iterator.


async def test_a_timed_out_read_loses_nothing_and_stays_subscribed(layers: Layers) -> None:
    # Cancelling receive() on the pub/sub layer would unsubscribe.
    with use_layers(layers):
        async with events.listen("emails") as feed:
            for number in range(5):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(feed), 0.01)
                events.publish("emails", "progress", JOB, number)
                [item] = await take(feed, 1)
                assert item.data == number


async def test_the_end_of_the_block_ends_an_iteration_elsewhere(layers: Layers) -> None:
    seen: list[Any] = []

    async def read(feed: events.Feed) -> None:
        async for item in feed:
            seen.append(item)  # noqa: PERF401

    with use_layers(layers):
        async with events.listen("emails") as feed:
            task = asyncio.create_task(read(feed))
            events.publish("emails", "started", JOB)
            while not seen:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.wait_for(task, 10)
        with pytest.raises(StopAsyncIteration):
            await anext(feed)
        events.publish("emails", "started", JOB)
    assert len(seen) == 1


async def test_queues_may_be_joined_and_left_on_the_way(layers: Layers) -> None:
    with use_layers(layers):
        async with events.listen("a") as feed:
            await feed.subscribe("b", "a")
            events.publish("b", "started", JOB)
            assert [item.queue for item in await take(feed, 1)] == ["b"]
            await feed.unsubscribe("a", "never joined")
            assert feed.queues == {"b"}
            events.publish("a", "started", JOB)
            assert await nothing_more(feed, "b") == []
            await feed.subscribe("a")
            events.publish("a", "completed", JOB)
            assert [item.event for item in await take(feed, 1)] == ["completed"]


async def test_a_reader_that_falls_behind_gets_a_gap_where_it_lost_events(layers: Layers) -> None:
    with use_layers(layers):
        async with events.listen("emails", buffer=10) as slow, events.listen("emails") as quick:
            for number in range(30):
                events.publish("emails", "progress", JOB, number)
            assert len(await take(quick, 30)) == 30
            got = await take(slow, 11)
            assert [item.data for item in got[:10]] == list(range(10))
            assert got[10] == events.Gap(reason="overflow")
            # It has caught up, and goes on live.
            events.publish("emails", "progress", JOB, "live")
            assert [item.data for item in await take(slow, 1)] == ["live"]
            # And again: one gap for each time that it fell behind.
            for number in range(30):
                events.publish("emails", "progress", JOB, number)
            assert len(await take(quick, 31)) == 31
            assert [type(item) for item in await take(slow, 11)] == [events.Event] * 10 + [
                events.Gap
            ]


async def test_a_reader_too_slow_for_one_event_still_hears_of_every_gap() -> None:
    with use_layers({}):
        async with events.listen("emails", buffer=1) as feed:
            for _ in range(3):
                events.publish("emails", "progress", JOB, 1)
                events.publish("emails", "progress", JOB, 2)
                got = await take(feed, 2)
                assert [type(item) for item in got] == [events.Event, events.Gap]


async def test_malformed_messages_are_ignored_and_the_next_one_arrives(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with use_layers(channel_layers(CORE, redis_url)):
        layer: Any = layer_manager.make_backend("default")
        group = events_group("emails")
        async with events.listen("emails") as feed:
            for message in (
                {},
                {"type": "echomq.events", "group": group},
                {"type": "echomq.events", "group": group, "queue": "emails", "events": 7},
                {"type": "echomq.events", "group": [], "queue": "emails", "events": []},
                {"type": "echomq.events", "group": group, "sender": {}, "number": "x"},
                {"type": "somebody.elses", "group": group},
                {"type": "echomq.probe", "group": group},
            ):
                await layer.group_send(group, message)
            events.publish("emails", "started", JOB)
            assert [item.event for item in await take(feed, 1)] == ["started"]
        await layer.close_pools()
    assert "event=bad_message" in caplog.text


# On the wire.


class Collector(AsyncConsumer):
    """A consumer as a user may write it: it joins the group by itself."""

    async def start(self, message: dict[str, Any]) -> None:
        await self.channel_layer.group_add(events_group("emails"), self.channel_name)
        await self.send({"type": "joined"})

    async def echomq_events(self, message: dict[str, Any]) -> None:
        await self.send(message)


@pytest.mark.parametrize("backend", [IN_MEMORY, ECHO, CORE, PUBSUB])
async def test_a_consumer_of_the_project_s_own_hears_the_feed(
    backend: str, request: pytest.FixtureRequest
) -> None:
    url = "" if backend in (IN_MEMORY, ECHO) else request.getfixturevalue("redis_url")
    with use_layers(channel_layers(backend, url)):
        layer: Any = get_channel_layer()
        consumer: Any = ApplicationCommunicator(  # type: ignore[no-untyped-call]
            Collector.as_asgi(), {"type": "collector"}
        )
        await consumer.send_input({"type": "start"})
        assert (await consumer.receive_output(10))["type"] == "joined"

        await sync_to_async(events.publish)("emails", "progress", JOB, {"n": 1})
        message = await consumer.receive_output(10)
        consumer.stop(exceptions=False)
        await asyncio.wait({consumer.future}, timeout=10)
        if url:
            await (layer.close_pools() if backend == CORE else layer.flush())

    assert message["type"] == "echomq.events"
    assert message["queue"] == "emails"
    assert message["group"] == events_group("emails")
    assert message["events"] == [{"event": "progress", "job_id": str(JOB), "data": '{"n":1}'}]
    [event] = events.unpack(message)
    assert event == events.Event(queue="emails", event="progress", job_id=JOB, data={"n": 1})
    assert type(event.job_id) is JobId


@brokers
async def test_many_events_travel_in_one_message_and_a_burst_in_few(
    backend: str, redis_url: str, redis_server: Redis
) -> None:
    with use_layers(channel_layers(backend, redis_url)), redis_server.client() as client:
        async with events.listen("emails") as feed:
            events.publish_many("emails", [("progress", JOB, n) for n in range(5000)])
            assert [item.data for item in await take(feed, 5000)] == list(range(5000))

            before = client.info("commandstats")
            redis_server.pause()
            for number in range(1000):
                events.publish("emails", "progress", JOB, number)
            redis_server.resume()
            assert [item.data for item in await take(feed, 1000)] == list(range(1000))
            after = client.info("commandstats")

    command = "cmdstat_publish" if backend == PUBSUB else "cmdstat_eval"
    sent = after[command]["calls"] - before.get(command, {"calls": 0})["calls"]
    assert sent < 20  # for 1,000 events


@brokers
@pytest.mark.parametrize("make", [channel_layers, echo_layers])
async def test_events_of_another_process_arrive(
    make: Callable[..., Layers], backend: str, redis_url: str
) -> None:
    layers = make(backend, redis_url)
    program = """
for n in range(50):
    events.publish("emails", "progress", new_job_id(), n)
sys.exit(0 if engine.flush(20) else 1)
"""
    with use_layers(layers):
        async with events.listen("emails") as feed:
            done = await asyncio.to_thread(run_program, program, layers)
            assert (done.returncode, done.stderr) == (0, "")
            assert [item.data for item in await take(feed, 50)] == list(range(50))


@brokers
async def test_a_hundred_feeds_on_several_loops_share_one_link(
    backend: str, redis_url: str, redis_server: Redis
) -> None:
    heard: list[Any] = []
    ready, published = threading.Barrier(4), threading.Event()

    async def elsewhere() -> None:
        async with events.listen("emails") as feed:
            await asyncio.to_thread(ready.wait, 20)
            heard.extend(await take(feed, 1))

    with use_layers(channel_layers(backend, redis_url)), redis_server.client() as client:
        before = len(client.client_list())
        feeds = [events.listen("emails") for _ in range(100)]
        for feed in feeds:
            await feed.__aenter__()
        threads = [threading.Thread(target=asyncio.run, args=(elsewhere(),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        await asyncio.to_thread(ready.wait, 20)
        events.publish("emails", "started", JOB)
        for feed in feeds:
            assert [item.event for item in await take(feed, 1)] == ["started"]
        # Receiving: one or two; sending: one; probing and joining: one or two.
        assert len(client.client_list()) - before <= 5
        for thread in threads:
            await asyncio.to_thread(thread.join, 20)
        for feed in feeds:
            await feed.__aexit__(None, None, None)
        published.set()

    assert len(heard) == 3


def test_publishing_does_not_wait_for_a_hung_broker() -> None:
    with hung_server() as url, use_layers(channel_layers(PUBSUB, url)):
        began = time.monotonic()
        for number in range(1000):
            events.publish("emails", "progress", JOB, number)
        assert time.monotonic() - began < 2.0


def test_tap_that_raises_keeps_an_event_from_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(event: events.Event) -> None:
        raise ValueError("not today")

    heard: list[events.Event] = []
    monkeypatch.setattr(events, "taps", [fails, heard.append])
    events.publish("emails", "progress", new_job_id())
    assert [event.event for event in heard] == ["progress"]
    assert caplog.text.count("event=failed doing=tap") == 1
