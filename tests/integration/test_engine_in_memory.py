"""Channels' in-memory layer: a consumer is woken from wherever a message is sent.

Its queues belong to the consumers' loop; a put from elsewhere leaves the consumer asleep
until something else wakes its loop. So each test has a consumer that already waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from channels.layers import get_channel_layer

from echomq_app import engine, signals
from tests.layers import IN_MEMORY, channel_layers, use_layers
from tests.wait import wait_until_async

GROUP = "orders"
MESSAGE = {"type": "x.y", "n": 1}


@contextlib.asynccontextmanager
async def waiting_consumer() -> AsyncIterator[asyncio.Task[Any]]:
    """Give a task that waits in `receive()`, as a Channels consumer does."""
    layer: Any = get_channel_layer()
    channel = await layer.new_channel()
    await layer.group_add(GROUP, channel)
    task = asyncio.create_task(layer.receive(channel))
    await wait_until_async(lambda: channel in layer.channels and layer.channels[channel]._getters)
    try:
        yield task
    finally:
        task.cancel()


async def got(task: asyncio.Task[Any]) -> Any:
    async with asyncio.timeout(10):
        return await task


async def test_from_async_code_on_the_same_loop() -> None:
    with use_layers(channel_layers(IN_MEMORY)):
        async with waiting_consumer() as task:
            assert engine.send(GROUP, MESSAGE) == 1
            assert (await got(task))["n"] == 1


async def test_from_a_sync_to_async_thread_which_is_a_sync_view_under_asgi() -> None:
    with use_layers(channel_layers(IN_MEMORY)):
        async with waiting_consumer() as task:
            assert await sync_to_async(engine.send)(GROUP, MESSAGE) == 1
            assert (await got(task))["n"] == 1


async def test_from_async_to_sync_below_a_sync_view() -> None:
    async def send() -> None:
        engine.send(GROUP, MESSAGE)

    with use_layers(channel_layers(IN_MEMORY)):
        async with waiting_consumer() as task:
            await sync_to_async(async_to_sync(send))()
            assert (await got(task))["n"] == 1


async def test_from_a_plain_thread_once_the_loop_is_bound() -> None:
    with use_layers(channel_layers(IN_MEMORY)):
        engine.bind_loop()
        async with waiting_consumer() as task:
            thread = threading.Thread(target=engine.send, args=(GROUP, MESSAGE))
            thread.start()
            assert (await got(task))["n"] == 1
            thread.join()


async def test_from_another_loop_once_the_loop_is_bound() -> None:
    async def send() -> None:
        engine.send(GROUP, MESSAGE)

    with use_layers(channel_layers(IN_MEMORY)):
        engine.bind_loop()
        async with waiting_consumer() as task:
            await asyncio.to_thread(asyncio.run, send())
            assert (await got(task))["n"] == 1


async def test_from_a_plain_thread_that_knows_no_loop_it_is_lost_and_said_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        told.append(kwargs)

    async def bind_another() -> None:
        engine.bind_loop()

    signals.publish_failed.connect(receive)
    try:
        with use_layers(channel_layers(IN_MEMORY)), caplog.at_level(logging.WARNING, "echomq"):
            # A loop that was bound and has ended is no loop.
            await asyncio.to_thread(asyncio.run, bind_another())
            async with waiting_consumer() as task:
                await asyncio.get_running_loop().run_in_executor(None, engine.send, GROUP, MESSAGE)
                assert not task.done()
    finally:
        signals.publish_failed.disconnect(receive)

    assert [loss["group"] for loss in told] == [GROUP]
    assert "bind_loop" in caplog.text


async def test_messages_from_a_thread_stay_in_order() -> None:
    layer: Any
    with use_layers(channel_layers(IN_MEMORY)):
        layer = get_channel_layer()
        channel = await layer.new_channel()
        await layer.group_add(GROUP, channel)

        def send() -> None:
            for number in range(100):
                engine.send(GROUP, {"type": "x.y", "n": number})

        await sync_to_async(send)()
        numbers = [(await layer.receive(channel))["n"] for _ in range(100)]

    assert numbers == list(range(100))


async def test_one_message_more_than_the_capacity_is_dropped_without_an_error() -> None:
    with use_layers(channel_layers(IN_MEMORY, capacity=5)):
        layer: Any = get_channel_layer()
        channel = await layer.new_channel()
        await layer.group_add(GROUP, channel)
        for number in range(6):
            assert engine.send(GROUP, {"type": "x.y", "n": number}) == 1
        await asyncio.sleep(0)

        async def drain() -> list[int]:
            return [(await layer.receive(channel))["n"] for _ in range(5)]

        assert await asyncio.wait_for(drain(), 10) == list(range(5))
        engine.send(GROUP, {"type": "x.y", "n": 6})
        assert (await asyncio.wait_for(layer.receive(channel), 10))["n"] == 6


async def test_nobody_in_the_group_is_success() -> None:
    with use_layers(channel_layers(IN_MEMORY)):
        assert engine.send(GROUP, MESSAGE) == 0
