"""The contract of a channel layer, with no transport and with each of the three."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import gc
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from asgiref.sync import async_to_sync
from channels.consumer import AsyncConsumer, SyncConsumer
from channels.exceptions import ChannelFull
from channels.generic.websocket import AsyncJsonWebsocketConsumer, JsonWebsocketConsumer
from channels.testing import WebsocketCommunicator
from channels.worker import Worker
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, override_settings
from django.urls import path
from django.utils.safestring import mark_safe

from echomq_app import engine, signals
from echomq_app.layers import CursorExpiredMixin, EchoChannelLayer, drain
from tests.integration.layers import Nodes, clean_layers, meet, state, subscriber, take, write
from tests.layer_transport import KINDS
from tests.servers import Redis
from tests.wait import wait_until, wait_until_async


class Alone:
    """Makes layers without a transport; each `make` is the same node."""

    def make(self, node: str, **options: Any) -> EchoChannelLayer:
        return EchoChannelLayer(**options)


@pytest.fixture(params=["none", *KINDS])
def nodes(request: pytest.FixtureRequest) -> Iterator[Alone | Nodes]:
    url = request.getfixturevalue("redis_url") if request.param in ("core", "pubsub") else ""
    with clean_layers(redis=bool(url)):
        yield Alone() if request.param == "none" else Nodes(request.param, url)


@pytest.fixture
def layer(nodes: Alone | Nodes) -> EchoChannelLayer:
    return nodes.make("a")


@pytest.fixture
def alone() -> Iterator[EchoChannelLayer]:
    with clean_layers(redis=False):
        yield EchoChannelLayer()


def message(number: object) -> dict[str, object]:
    return {"type": "test.message", "n": number}


def test_extensions(alone: EchoChannelLayer) -> None:
    assert alone.extensions == ["groups", "flush", "echo"]


async def test_send_and_receive(layer: EchoChannelLayer) -> None:
    channel = await layer.new_channel()
    assert layer.require_valid_channel_name(channel)
    await layer.send(channel, message(1))
    await layer.send(channel, message(2))
    assert await take(layer, channel, 2) == [1, 2]


async def test_new_channels_differ_and_take_a_prefix(layer: EchoChannelLayer) -> None:
    names = {await layer.new_channel() for _ in range(10)} | {await layer.new_channel("test")}
    assert len(names) == 11
    assert any(name.startswith("test.") for name in names)


async def test_groups(layer: EchoChannelLayer) -> None:
    one, two, other = [await layer.new_channel() for _ in range(3)]
    await layer.group_add("g", one)
    await layer.group_add("g", two)
    await layer.group_add("g", two)  # joining twice is joining once
    await layer.group_add("h", other)
    await layer.group_send("g", message(1))
    assert await take(layer, one) == await take(layer, two) == [1]
    await layer.group_discard("g", two)
    await layer.group_discard("g", two)
    await layer.group_send("g", message(2))
    await layer.group_send("h", message(3))
    assert (await take(layer, one), await take(layer, other)) == ([2], [3])
    await layer.send(two, message(4))
    assert await take(layer, two) == [4]


async def test_flush_forgets_messages_and_groups(layer: EchoChannelLayer) -> None:
    channel = await subscriber(layer)
    await write(layer, 1)
    await layer.flush()
    await write(layer, 2)
    await layer.send(channel, message(3))
    assert await take(layer, channel) == [3]
    await layer.group_add("g", channel)
    await write(layer, 4)
    assert await take(layer, channel) == [4]


async def test_the_message_of_the_sender_is_its_own(layer: EchoChannelLayer) -> None:
    one, two = await subscriber(layer), await subscriber(layer)
    sent = {"type": "x", "list": [1], "bytes": b"\xff", "text": "é", "none": None, "f": 0.5}
    await layer.group_send("g", sent)
    sent["list"] = []
    first = await layer.receive(one)
    first["list"].append(2)
    assert (await layer.receive(two))["list"] == [1]


@pytest.mark.parametrize("wrong", [None, "text", [("type", "x")]])
async def test_what_is_no_message_is_refused(alone: EchoChannelLayer, wrong: Any) -> None:
    with pytest.raises(TypeError, match="A message is a dict"):
        await alone.group_send("g", wrong)
    with pytest.raises(TypeError, match="A message is a dict"):
        await alone.send("c", wrong)


async def test_what_cant_be_encoded_is_refused_at_once(alone: EchoChannelLayer) -> None:
    with pytest.raises(TypeError, match="A object has to be turned"):
        await alone.group_send("g", {"type": "x", "object": object()})


class Text(str):
    """A text of another class."""


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (mark_safe("<p>rendered</p>"), "<p>rendered</p>"),  # by render_to_string, say
        (Text("x"), "x"),
        (Colour.RED, 1),
        (OrderedDict(a=1), {"a": 1}),
        ((1, 2), [1, 2]),
        ({Text("key"): None}, {"key": None}),
        (True, True),
    ],
)
async def test_values_of_subclasses(alone: EchoChannelLayer, sent: Any, received: Any) -> None:
    channel = await subscriber(alone)
    await alone.group_send("g", {"type": "x", "value": sent, "reply": channel})
    assert await alone.receive(channel) == {"type": "x", "value": received, "reply": channel}


@pytest.mark.parametrize("name", ["", "with space", "colon:", "x" * 100, "é", 5])
async def test_names_that_cant_be(alone: EchoChannelLayer, name: Any) -> None:
    with pytest.raises(TypeError):
        await alone.group_send(name, message(1))
    with pytest.raises(TypeError):
        await alone.group_add(name, await alone.new_channel())
    with pytest.raises(TypeError):
        await alone.send(name, message(1))
    with pytest.raises(TypeError):
        await alone.receive(name)


async def test_a_channel_of_another_process_is_no_channel_to_receive_from(
    layer: EchoChannelLayer,
) -> None:
    with pytest.raises(ValueError, match="belongs to another process"):
        await layer.receive("specific.0123456789abcdef!x")


async def test_a_send_to_nobodys_channel_is_lost(layer: EchoChannelLayer) -> None:
    await layer.send("specific.0123456789abcdef!x", message(1))
    await layer.send(f"specific.{state(layer).boot}!gone", message(1))


# Full channels.


async def test_send_to_a_full_channel(nodes: Alone | Nodes) -> None:
    layer = nodes.make("a", capacity=3)
    channel = await layer.new_channel()
    for number in range(3):
        await layer.send(channel, message(number))
    with pytest.raises(ChannelFull):
        await layer.send(channel, message(3))
    assert await take(layer, channel, 3) == [0, 1, 2]


async def test_an_overflow_drops_the_new_and_is_told_once_when_drained(
    nodes: Alone | Nodes,
) -> None:
    layer = nodes.make("a", capacity=3)
    channel = await subscriber(layer)
    await write(layer, *range(4))  # a burst of capacity + 1
    assert await take(layer, channel) == [0]
    await write(layer, 4, 5)  # there is room, but a hole before them
    heard = await take(layer, channel, 2)
    assert heard == [1, 2]
    assert await layer.receive(channel) == {
        "type": "echo.cursor_expired",
        "node": state(layer).name,
        "missed": 3,
    }
    await write(layer, 6)
    assert await take(layer, channel) == [6]


async def test_one_full_channel_costs_the_others_nothing(nodes: Alone | Nodes) -> None:
    layer = nodes.make("a", capacity=10)
    slow, quick = await subscriber(layer), await subscriber(layer)
    for number in range(30):
        await write(layer, number)
        assert await take(layer, quick) == [number]
    assert len(layer._station.local.open(slow).items) == 10


# Waiting for nobody.


@contextlib.contextmanager
def busy_engine(seconds: float) -> Iterator[None]:
    """Let something else hold the engine's loop during the block."""
    let_go = threading.Event()
    held = threading.Event()

    async def hold() -> None:
        held.set()
        let_go.wait(seconds)  # blocks the loop, on purpose

    future = engine.submit(hold)
    assert held.wait(30)
    try:
        yield
    finally:
        let_go.set()
        future.result(30)


async def test_group_send_waits_for_no_engine(layer: EchoChannelLayer) -> None:
    channel = await subscriber(layer)
    with busy_engine(20):
        began = time.monotonic()
        await write(layer, *range(100))
        assert await take(layer, channel, 100) == list(range(100))
        assert time.monotonic() - began < 10


async def test_a_timeout_counts_only_while_the_engines_ticks_are_on_time() -> None:
    failures: list[object] = []

    def failed(sender: object, **details: Any) -> None:
        failures.append(details)

    signals.sync_failure.connect(failed)
    with clean_layers():
        nodes = Nodes("memory")
        a, b = await nodes.pair(call_timeout=0.5)
        channel = await subscriber(b)
        await write(a, 1)
        with busy_engine(3.0):
            await asyncio.sleep(1.5)
        assert await take(b, channel) == [1]
        await wait_until_async(state(a).drained, 30)
    signals.sync_failure.disconnect(failed)
    assert failures == []


async def test_one_wake_up_per_delivery_and_loop(
    alone: EchoChannelLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    channels = [await subscriber(alone) for _ in range(50)]
    waiting = [asyncio.create_task(alone.receive(channel)) for channel in channels]
    await asyncio.sleep(0)
    calls: list[object] = []
    call_soon = loop.call_soon_threadsafe

    def counted(callback: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(callback)
        return call_soon(callback, *args, **kwargs)

    records = [("g", msgspec.msgpack.encode(message(number))) for number in range(20)]
    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    thread = threading.Thread(target=alone._station.local.deliver, args=(records,))
    thread.start()
    thread.join()
    assert len(calls) == 1
    assert [one["n"] for one in await asyncio.gather(*waiting)] == [0] * 50


async def test_the_first_after_a_pause_goes_at_once_and_what_follows_is_gathered() -> None:
    with clean_layers():
        nodes = Nodes("memory")
        options = {"batch_interval": 1000.0, "heartbeat_interval": 100.0, "forget_after": 300.0}
        a, b = await nodes.pair(**options)
        channel = await subscriber(b)
        await write(a, 0)
        assert await take(b, channel) == [0]
        await wait_until_async(state(a).drained, 30)
        nodes.hub.sent.clear()
        await write(a, *range(1, 50))
        for _ in range(5):
            await a._station.on_engine(lambda: asyncio.sleep(0.01))
        assert nodes.hub.sent == []
        assert await asyncio.to_thread(drain, 30)  # which waits for no interval
        assert await take(b, channel, 49) == list(range(1, 50))
        assert nodes.hub.sent.count(("a", "b")) == 1


async def test_a_whole_frame_waits_for_no_interval() -> None:
    with clean_layers():
        nodes = Nodes("memory")
        a, b = await nodes.pair(batch_interval=1000.0, max_batch=10)
        channel = await subscriber(b)
        await write(a, 0)
        assert await take(b, channel) == [0]
        await write(a, *range(1, 11))
        assert await take(b, channel, 10) == list(range(1, 11))


async def test_no_interval_coalesces_what_comes_during_a_round_trip() -> None:
    with clean_layers():
        nodes = Nodes("memory")
        a, b = await nodes.pair(batch_interval=0, heartbeat_interval=60.0, forget_after=200.0)
        channel = await subscriber(b)
        nodes.hub.sent.clear()
        await write(a, *range(1000))
        assert await take(b, channel, 1000) == list(range(1000))
        assert nodes.hub.sent.count(("a", "b")) < 500


# A broker that forgets, and one that has nothing to say.


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_broker_forgot_comes_back_by_itself(
    kind: str, make_redis: Callable[..., Redis]
) -> None:
    with clean_layers():
        server = make_redis() if kind != "memory" else None
        nodes = Nodes(kind, server.url if server else "")
        a, b = await nodes.pair()
        if server:
            server.flush()
        else:
            nodes.hub.groups.clear()
        c = nodes.make("c")
        channel = await subscriber(c)
        await meet(a, b, c)
        await write(a, 1)
        assert await take(c, channel) == [1]


async def test_neither_memberships_nor_messages_expire(
    alone: EchoChannelLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # And neither do messages, of a handler that is busy for so long.
    channel = await subscriber(alone)
    await write(alone, 0)
    real, monotonic = time.time, time.monotonic
    monkeypatch.setattr(time, "time", lambda: real() + 25 * 3600)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 25 * 3600)
    await write(alone, 1)
    assert await take(alone, channel, 2) == [0, 1]


# Receiving.


async def test_a_cancelled_receive_loses_nothing_and_reorders_nothing(
    layer: EchoChannelLayer,
) -> None:
    channel = await subscriber(layer)
    heard = []
    for number in range(50):
        waiting = asyncio.create_task(layer.receive(channel))
        await asyncio.sleep(0)
        await write(layer, number)
        waiting.cancel()  # woken, if it waited, and it hasn't looked yet
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            heard.append(waiting.result()["n"])
    assert len(heard) < 50
    assert heard + await take(layer, channel, 50 - len(heard)) == list(range(50))


async def test_a_cancelled_receive_wakes_the_next_one(layer: EchoChannelLayer) -> None:
    channel = await subscriber(layer)
    first, second = [asyncio.create_task(layer.receive(channel)) for _ in range(2)]
    await asyncio.sleep(0)
    await write(layer, 1)
    first.cancel()
    assert (await asyncio.wait_for(second, 30))["n"] == 1


async def test_receivers_on_two_loops_at_once(layer: EchoChannelLayer) -> None:
    here = await subscriber(layer)
    there: list[Any] = []
    ready = threading.Event()

    async def elsewhere() -> None:
        channel = await subscriber(layer)
        ready.set()
        there.extend(await take(layer, channel, 100))

    thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
    thread.start()
    await asyncio.to_thread(ready.wait, 30)
    await write(layer, *range(100))
    assert await take(layer, here, 100) == list(range(100))
    await asyncio.to_thread(thread.join, 30)
    assert there == list(range(100))


async def test_the_channel_of_a_closed_loop_is_removed(alone: EchoChannelLayer) -> None:
    def die_waiting() -> None:
        loop = asyncio.new_event_loop()
        channel = loop.run_until_complete(subscriber(alone))
        task = loop.create_task(alone.receive(channel))
        loop.call_later(0.05, loop.stop)
        loop.run_forever()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()

    await asyncio.to_thread(die_waiting)
    assert len(alone._station.local._boxes) == 1
    await write(alone, 1)
    assert alone._station.local._boxes == {}
    assert alone._station.local._groups == {}


async def test_the_channel_of_a_consumer_that_died_is_removed(
    alone: EchoChannelLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echomq_app.layers.local.ORPHANED", 0.0)
    boxes = alone._station.local._boxes

    class Fails(AsyncConsumer):
        async def start(self, event: dict[str, Any]) -> None:
            layer: Any = alone
            await layer.group_add("g", self.channel_name)
            raise KeyError

    async def live_and_die() -> None:
        layers = {"default": {"BACKEND": "echomq_app.layers.EchoChannelLayer"}}
        with override_settings(CHANNEL_LAYERS=layers):
            queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
            await queue.put({"type": "start"})
            application: Any = Fails()
            with pytest.raises(KeyError):
                await application({"type": "x"}, queue.get, queue.put)
            del application

    channel = await alone.new_channel()
    station = alone._station
    monkeypatch.setattr("echomq_app.layers.layer.station", lambda options: station)
    for _ in range(5):
        await live_and_die()
    await alone.group_add("g", channel)
    gc.collect()
    await write(alone, 1)
    assert len(boxes) <= 2  # something in asgiref holds the last one until the next
    assert await take(alone, channel) == [1]


async def test_sockets_that_came_and_went_leave_nothing(
    configured: EchoChannelLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They leave their groups and say nothing more, so no message ever touches their channels.
    monkeypatch.setattr("echomq_app.layers.local.ORPHANED", 0.0)
    for _ in range(30):
        socket = await connected(Echo)
        await socket.disconnect()
    del socket
    gc.collect()
    last = await connected(Echo)
    assert len(configured._station.local._boxes) <= 3  # and something in asgiref holds one
    await last.disconnect()


async def test_a_channel_that_is_known_by_a_copy_of_its_name_stays(
    alone: EchoChannelLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echomq_app.layers.local.ORPHANED", 0.0)
    channel = str(await alone.new_channel())
    await alone.group_add("g", channel)
    gc.collect()
    await write(alone, 1)
    assert await take(alone, channel) == [1]


def test_from_sync_code_and_from_threads(layer: EchoChannelLayer) -> None:
    channel = async_to_sync(layer.new_channel)()
    async_to_sync(layer.group_add)("g", channel)

    def work(number: int) -> None:
        async_to_sync(layer.group_send)("g", message(number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    heard = async_to_sync(take)(layer, channel, 10)
    assert sorted(heard) == list(range(10))


async def test_closing_a_layer_object_removes_its_channels_only(alone: EchoChannelLayer) -> None:
    other = EchoChannelLayer()
    await subscriber(alone)
    kept = await subscriber(other)
    await alone.close()
    await write(alone, 1)
    assert await take(other, kept) == [1]
    assert len(alone._station.local._boxes) == 1


async def test_from_a_sync_view(configured: EchoChannelLayer) -> None:
    channel = await subscriber(configured)
    with override_settings(ROOT_URLCONF=__name__, MIDDLEWARE=[]):
        response = await AsyncClient().get("/send/")
    assert response.status_code == 200
    assert await take(configured, channel) == [5]


def send_view(request: HttpRequest) -> HttpResponse:
    from channels.layers import get_channel_layer

    layer: Any = get_channel_layer()
    async_to_sync(layer.group_send)("g", message(5))
    return HttpResponse("sent")


urlpatterns = [path("send/", send_view)]


# What Channels builds on it.


class Echo(AsyncJsonWebsocketConsumer):
    groups = ["g"]

    async def test_message(self, event: dict[str, Any]) -> None:
        await self.send_json(event["n"])

    async def receive_json(self, content: Any, **kwargs: Any) -> None:
        layer: Any = self.channel_layer
        await layer.group_send("g", message(content))


class EchoSync(JsonWebsocketConsumer):
    groups = ["g"]

    def test_message(self, event: dict[str, Any]) -> None:
        self.send_json(event["n"])


class Reloads(CursorExpiredMixin, Echo):
    async def cursor_expired(self, node: str, missed: int) -> None:
        await self.send_json(["reload", node, missed])


class ReloadsSync(CursorExpiredMixin, EchoSync):
    def cursor_expired(self, node: str, missed: int) -> None:
        self.send_json(["reload", node, missed])


LAYERS = {"default": {"BACKEND": "echomq_app.layers.EchoChannelLayer", "CONFIG": {"capacity": 2}}}


@pytest.fixture
def configured() -> Iterator[EchoChannelLayer]:
    from channels.layers import get_channel_layer

    with clean_layers(redis=False), override_settings(CHANNEL_LAYERS=LAYERS):
        layer = get_channel_layer()
        assert isinstance(layer, EchoChannelLayer)
        yield layer


async def connected(consumer: Any) -> WebsocketCommunicator:
    socket = WebsocketCommunicator(consumer.as_asgi(), "/")
    assert (await socket.connect(timeout=30))[0]
    return socket


async def test_websocket_consumers(configured: EchoChannelLayer) -> None:
    one, two = await connected(Echo), await connected(Echo)
    await one.send_json_to(5)
    assert await one.receive_json_from(30) == await two.receive_json_from(30) == 5
    await one.disconnect()
    await two.disconnect()
    assert configured._station.local._groups == {}


@pytest.mark.parametrize("consumer", [Echo, EchoSync])
@pytest.mark.django_db(transaction=True)
async def test_a_consumer_without_a_handler_is_closed_with_4410(
    configured: EchoChannelLayer, consumer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echomq_app.layers.consumers.CLOSE_WITHIN", 0.05)
    socket = await connected(consumer)
    configured._station.local.notify("other", 3)
    await write(configured, 1)
    assert await socket.receive_output(30) == {"type": "websocket.close", "code": 4410}
    await socket.disconnect()


@pytest.mark.parametrize("consumer", [Reloads, ReloadsSync])
@pytest.mark.django_db(transaction=True)
async def test_a_consumer_that_knows_better_reloads_before_it_goes_on(
    configured: EchoChannelLayer, consumer: Any
) -> None:
    socket = await connected(consumer)
    configured._station.local.notify("other", 3)
    await write(configured, 1)
    assert await socket.receive_json_from(30) == ["reload", "other", 3]
    assert await socket.receive_json_from(30) == 1
    await socket.disconnect()


def test_other_consumers_log_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    notice = {"type": "echo.cursor_expired", "node": "other", "missed": 3}
    asyncio.run(AsyncConsumer().dispatch(notice))
    SyncConsumer.echo_cursor_expired(SyncConsumer(), notice)  # type: ignore[attr-defined]
    assert caplog.text.count("event=consumer_cursor_expired") == 2


async def test_runworker_hears_its_channels(layer: EchoChannelLayer) -> None:
    done: list[Any] = []

    class Thumbnails(AsyncConsumer):
        async def make(self, event: dict[str, Any]) -> None:
            done.append(event["n"])

    worker = Worker(Thumbnails.as_asgi(), ["thumbnails"], layer)
    running = asyncio.create_task(worker.handle())
    deadline = 200
    while not done and deadline:  # pub/sub only delivers to those who are there
        await layer.send("thumbnails", {"type": "make", "n": 1})
        await asyncio.sleep(0.05)
        deadline -= 1
    assert done[:1] == [1]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# Notices.


async def test_a_notice_reaches_only_who_had_joined(alone: EchoChannelLayer) -> None:
    before, never = await subscriber(alone), await alone.new_channel()
    alone._station.local.notify("other", 3)
    after = await subscriber(alone)
    await write(alone, 1)
    await alone.send(never, message(2))
    assert await take(alone, before, 2) == ["other", 1]
    assert await take(alone, after) == [1]
    assert await take(alone, never) == [2]


async def test_notices_in_a_row_are_one_per_node(alone: EchoChannelLayer) -> None:
    channel = await subscriber(alone)
    for node in ("x", "y", "x", "x"):
        alone._station.local.notify(node, 2)
    await write(alone, 1)
    alone._station.local.notify("x", 1)
    heard = [await alone.receive(channel) for _ in range(4)]
    assert [(one.get("node"), one.get("missed")) for one in heard] == [
        ("x", 6),
        ("y", 2),
        (None, None),
        ("x", 1),
    ]


# One node for one configuration.


async def test_two_layers_of_one_configuration_are_one_node(nodes: Alone | Nodes) -> None:
    one, two = nodes.make("a"), nodes.make("a")
    channel = await subscriber(one)
    await write(two, 1)
    assert await take(one, channel) == [1]


def test_drain_tells_that_everybody_has_everything(layer: EchoChannelLayer) -> None:
    async_to_sync(layer.group_send)("g", message(1))
    assert drain(30)


def test_the_engine_can_stop_and_the_node_lives_on(redis_url: str) -> None:
    with clean_layers():
        nodes = Nodes("pubsub", redis_url)
        a, b = async_to_sync(nodes.pair)()
        channel = async_to_sync(subscriber)(b)
        boot = state(a).boot
        assert engine.stop()
        wait_until(lambda: a._station._running is None)
        async_to_sync(write)(a, 1)
        b._station.start()
        assert async_to_sync(take)(b, channel) == [1]
        assert state(a).boot == boot
