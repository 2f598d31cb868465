"""Whoever sends, from wherever in a process, is heard; and the process ends at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from echomq_app.layers import EchoChannelLayer
from tests.integration.layers import QUICK, clean_layers, subscriber, take
from tests.layers import (
    CORE,
    ECHO,
    PUBSUB,
    channel_layers,
    echo_layers,
    hung_server,
    run_program,
)

transports = pytest.mark.parametrize("backend", [CORE, PUBSUB])
# Where the transport makes no difference, one of them is enough.
on_core = pytest.mark.parametrize("backend", [CORE])
on_pubsub = pytest.mark.parametrize("backend", [PUBSUB])

SEND = """
import asyncio
from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from echomq_app.layers import drain

def send(*numbers):
    for number in numbers:
        async_to_sync(get_channel_layer().group_send)("g", {"type": "x", "n": number})
"""


class Ear:
    """A subscriber in this process."""

    def __init__(self, layer: EchoChannelLayer, channel: str) -> None:
        self._layer = layer
        self._channel = channel

    async def hears(self, *numbers: int) -> None:
        assert await take(self._layer, self._channel, len(numbers)) == list(numbers)


@pytest.fixture
def tidy() -> Iterator[None]:
    with clean_layers():
        yield


@pytest.fixture
async def ear(backend: str, redis_url: str, tidy: None) -> Ear:
    transport = {"BACKEND": backend, "CONFIG": {"hosts": [redis_url]}}
    layer = EchoChannelLayer(transport=transport, node="ear", **QUICK)
    return Ear(layer, await subscriber(layer))


async def run(program: str, backend: str, url: str, *arguments: str, **options: Any) -> float:
    """Run a program that has to end well and silently; return how long its end took."""
    done = await asyncio.to_thread(
        run_program,
        SEND + program + "\nprint(time.monotonic())",
        echo_layers(backend, url, **options),
        *arguments,
    )
    after = time.monotonic()
    assert (done.returncode, done.stderr) == (0, "")
    return after - float(done.stdout.split()[-1])


@transports
async def test_a_command_that_sends_one_message_and_exits(
    backend: str, redis_url: str, ear: Ear
) -> None:
    await run("send(1)", backend, redis_url)
    await ear.hears(1)
    await run("send(2)", backend, redis_url)  # no notice in between: it said goodbye
    await ear.hears(2)


@on_core
async def test_a_command_that_sends_thousands_and_exits(
    backend: str, redis_url: str, ear: Ear
) -> None:
    await run("send(*range(3000))", backend, redis_url)
    await ear.hears(*range(3000))


@on_pubsub
async def test_from_threads_and_from_a_loop_of_ones_own(
    backend: str, redis_url: str, ear: Ear
) -> None:
    program = """
thread = threading.Thread(target=send, args=(1,))
thread.start(); thread.join()

async def main():
    await get_channel_layer().group_send("g", {"type": "x", "n": 2})
asyncio.run(main())
asyncio.run(main())
"""
    await run(program, backend, redis_url)
    await ear.hears(1, 2, 2)


@transports
async def test_from_a_sync_view_a_consumer_and_a_management_command(
    backend: str, redis_url: str, ear: Ear
) -> None:
    program = """
import django
from channels.generic.websocket import AsyncWebsocketConsumer
from channels.testing import HttpCommunicator, WebsocketCommunicator
from django.core.asgi import get_asgi_application
from django.core.management import BaseCommand, call_command
from django.http import HttpResponse
from django.urls import path

settings.ROOT_URLCONF, settings.ALLOWED_HOSTS = "__main__", ["*"]
django.setup()

def view(request):
    send(1)
    return HttpResponse()

urlpatterns = [path("send/", view)]

class Consumer(AsyncWebsocketConsumer):
    async def receive(self, text_data):
        await self.channel_layer.group_send("g", {"type": "x", "n": int(text_data)})
        await self.close()

class Command(BaseCommand):
    def handle(self, **options):
        send(3)

async def main():
    request = HttpCommunicator(
        get_asgi_application(), "GET", "/send/", headers=[(b"host", b"test")]
    )
    assert (await request.get_response(30))["status"] == 200
    socket = WebsocketCommunicator(Consumer.as_asgi(), "/")
    assert (await socket.connect(30))[0]
    await socket.send_to(text_data="2")
    assert (await socket.receive_output(30))["type"] == "websocket.close"
    await socket.disconnect()

asyncio.run(main())
call_command(Command())
"""
    await run(program, backend, redis_url)
    await ear.hears(1, 2, 3)


@transports
async def test_from_a_forked_child(backend: str, redis_url: str, ear: Ear) -> None:
    program = """
send(1)
assert drain(30)
child = os.fork()
if child == 0:
    send(2)
    os._exit(0 if drain(30) else 1)
assert os.waitpid(child, 0)[1] == 0
send(3)
"""
    await run(program, backend, redis_url)
    await ear.hears(1, 2, 3)


@on_pubsub
async def test_from_a_child_of_multiprocessing(backend: str, redis_url: str, ear: Ear) -> None:
    program = """
import multiprocessing
send(1)
assert drain(30)
child = multiprocessing.get_context("fork").Process(target=send, args=(2,))
child.start(); child.join()
assert child.exitcode == 0
send(3)
"""
    await run(program, backend, redis_url)
    await ear.hears(1, 2, 3)


@transports
async def test_a_thread_that_goes_on_after_the_main_one_has_ended(
    backend: str, redis_url: str, ear: Ear
) -> None:
    program = """
def late():
    threading.main_thread().join()
    for number in range(1, 200):  # where async_to_sync can't begin anything any more
        get_channel_layer().post("g", {"type": "x", "n": number})
        time.sleep(0.005)
send(0)
threading.Thread(target=late).start()
"""
    await run(program, backend, redis_url)
    await ear.hears(*range(200))
    await run("send(200)", backend, redis_url)  # it said goodbye: no notice
    await ear.hears(200)


@on_pubsub
async def test_an_event_of_the_feed_just_before_the_end(
    backend: str, redis_url: str, ear: Ear
) -> None:
    # It waits in the engine, which sends it by the layer, which has to bring it.
    program = """
for number in range(100):
    engine.send("g", {"type": "x", "n": number})
"""
    await run(program, backend, redis_url)
    await ear.hears(*range(100))


@on_core
async def test_a_child_has_no_channels_of_its_parent(
    backend: str, redis_url: str, ear: Ear
) -> None:
    program = """
async def main():
    layer = get_channel_layer()
    channel = await layer.new_channel()
    await layer.group_add("g", channel)
    return channel
channel = asyncio.run(main())
child = os.fork()
if child == 0:
    try:
        asyncio.run(asyncio.wait_for(get_channel_layer().receive(channel), 5))
    except ValueError as error:
        os._exit(0 if "belongs to another process" in str(error) else 2)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
send(1)
assert asyncio.run(get_channel_layer().receive(channel))["n"] == 1
"""
    await run(program, backend, redis_url)
    await ear.hears(1)


@on_core
async def test_a_process_that_has_nothing_to_send_ends_at_once(
    backend: str, redis_url: str, ear: Ear
) -> None:
    program = """
async def main():
    layer = get_channel_layer()
    await layer.group_add("g", await layer.new_channel())
asyncio.run(main())
"""
    assert await run(program, backend, redis_url) < 4.0


@pytest.mark.parametrize(
    ("backend", "program"),
    [(CORE, "get_channel_layer()._station.start()"), (CORE, "send(1)"), (PUBSUB, "send(1)")],
)
async def test_a_hung_broker_holds_no_exit(backend: str, program: str) -> None:
    with hung_server() as url:
        spent = await run(f"import logging; logging.disable()\n{program}", backend, url)
    assert spent < 6.0  # FLUSH_DEADLINE is 2


async def test_without_a_transport_no_thread_is_started() -> None:
    program = """
async def main():
    layer = get_channel_layer()
    channel = await layer.new_channel()
    await layer.group_add("g", channel)
    await layer.group_send("g", {"type": "x", "n": 1})
    assert (await layer.receive(channel))["n"] == 1
before = threading.active_count()
asyncio.run(main())
assert threading.active_count() == before == 1
"""
    done = await asyncio.to_thread(
        run_program,
        SEND + program,
        channel_layers(ECHO),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@transports
async def test_a_process_whose_own_loop_is_saturated_is_no_lost_node(
    backend: str, redis_url: str, ear: Ear
) -> None:
    # Its ASGI loop is blocked; the engine's thread still receives, acks and sends.
    program = """
async def main():
    layer = get_channel_layer()
    channel = await layer.new_channel()
    await layer.group_add("g", channel)
    await layer.group_send("g", {"type": "x", "n": 1})
    end = time.monotonic() + 3
    while time.monotonic() < end:
        sum(range(10000))
    await layer.group_send("g", {"type": "x", "n": 2})
    assert [(await layer.receive(channel))["n"] for _ in range(2)] == [1, 2]
asyncio.run(main())
"""
    options = {"call_timeout": 1.0, "heartbeat_interval": 0.3, "forget_after": 2.0}
    await run(program, backend, redis_url, **options)
    await ear.hears(1, 2)
