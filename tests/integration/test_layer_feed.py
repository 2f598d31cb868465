"""The feed and the wake-ups over an EchoChannelLayer, and where a layer ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from channels.layers import get_channel_layer

from echomq_app import engine, events
from echomq_app.core.ids import new_job_id
from echomq_app.core.names import events_group
from echomq_app.engine.reach import crosses_processes
from project.seismic import feed as seismic_feed
from tests.integration.layers import clean_layers
from tests.layers import (
    CORE,
    ECHO,
    IN_MEMORY,
    PUBSUB,
    Layers,
    channel_layers,
    echo_layers,
    run_program,
    use_layers,
)
from tests.servers import Redis

JOB = new_job_id()
transports = pytest.mark.parametrize("backend", [CORE, PUBSUB])


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    with clean_layers():
        yield


class Foreign:
    """A layer that we know nothing about."""


FAR = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize(
    ("layers", "crosses"),
    [
        ({}, False),
        (channel_layers(IN_MEMORY), False),
        (channel_layers(ECHO), False),
        (channel_layers(ECHO, transport={"BACKEND": IN_MEMORY}), False),
        ({**channel_layers(ECHO, transport="memory"), "memory": {"BACKEND": IN_MEMORY}}, False),
        (channel_layers(CORE, FAR), True),
        (channel_layers(PUBSUB, FAR), True),
        (echo_layers(CORE, FAR), True),
        (echo_layers(PUBSUB, FAR), True),
        (channel_layers(f"{__name__}.Foreign"), True),
    ],
)
def test_what_reaches_other_processes(layers: Layers, crosses: bool) -> None:
    with use_layers(layers):
        assert crosses_processes(get_channel_layer()) is crosses
        assert engine.has_broker() is crosses
        assert seismic_feed.crosses_processes() is crosses


async def test_without_a_transport_a_consumer_on_any_loop_is_woken_from_any_thread() -> None:
    with use_layers(channel_layers(ECHO)):
        layer: Any = get_channel_layer()

        async def hear() -> Any:
            channel = await layer.new_channel()
            await layer.group_add("orders", channel)
            waiting.set()
            return await asyncio.wait_for(layer.receive(channel), 30)

        waiting = asyncio.Event()
        here = asyncio.create_task(hear())
        await waiting.wait()
        assert await sync_to_async(engine.send, thread_sensitive=False)("orders", {"n": 1}) == 1
        assert (await here)["n"] == 1


async def test_without_a_transport_what_cant_be_encoded_is_reported_and_not_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with use_layers(channel_layers(ECHO)):
        assert engine.send("orders", {"type": "x.y", "what": object()}) == 0
    assert "event=publish_failed group=orders count=1" in caplog.text


@transports
async def test_the_feed_loses_nothing_when_redis_restarts_empty(
    backend: str, make_redis: Callable[..., Redis]
) -> None:
    """Bare, either layer loses what is published meanwhile, and the feed says `Gap`."""
    server = make_redis(tcp=True)
    options = {"batch_interval": 0, "heartbeat_interval": 0.5, "call_timeout": 1.0}
    layers = echo_layers(backend, server.url, **options)
    program = """
for n in range(300):
    events.publish("emails", "progress", new_job_id(), n)
    time.sleep(0.005)
"""
    with use_layers(layers):
        async with events.listen("emails") as feed:
            publishing = asyncio.create_task(
                asyncio.to_thread(run_program, program, layers, FLUSH_DEADLINE=30)
            )
            heard = [await asyncio.wait_for(anext(feed), 30) for _ in range(50)]
            server.restart_empty()
            heard += [await asyncio.wait_for(anext(feed), 30) for _ in range(250)]
            done = await publishing
    assert done.returncode == 0, done.stderr  # which may say that a batch wasn't acked in time
    assert [item.data if isinstance(item, events.Event) else item for item in heard] == [
        *range(300)
    ]


@transports
async def test_a_notice_is_a_gap_for_the_feeds(backend: str, redis_url: str) -> None:
    with use_layers(echo_layers(backend, redis_url)):
        layer: Any = get_channel_layer()
        async with events.listen("emails") as feed:
            layer._station.local.notify("other", 3)
            assert await asyncio.wait_for(anext(feed), 30) == events.Gap(reason="lost")
            await layer.group_send(
                events_group("emails"),
                {
                    "type": "echomq.events",
                    "queue": "emails",
                    "group": events_group("emails"),
                    "events": [{"event": "started", "job_id": str(JOB), "data": None}],
                },
            )
            event = await asyncio.wait_for(anext(feed), 30)
    assert isinstance(event, events.Event)
