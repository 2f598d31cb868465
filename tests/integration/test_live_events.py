"""Events on the socket: what a client that doesn't keep up costs, and is told."""

from __future__ import annotations

from typing import Any

import pytest

from echomq_app import events
from echomq_app.core.frames import Subscribe
from echomq_app.core.ids import new_job_id
from echomq_app.live.consumers import EchoConsumer
from echomq_app.live.subscribed import READY_EVENTS, EventSubscription
from tests.live_client import LiveSocket
from tests.wait import wait_until_async

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _everybody_may(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.ECHOMQ = {"AUTHORIZE": lambda user, action, target: True}
    monkeypatch.setattr("echomq_app.live.subscribed.HEARD_EVENTS", 50)
    monkeypatch.setattr("echomq_app.live.subscribed.WINDOW_EVENTS", 20)


async def test_who_falls_behind_is_told_where_events_are_missing() -> None:
    page = LiveSocket(EchoConsumer.as_asgi())
    await page.open()
    await page.send({"type": "subscribe", "sub": 5, "events": "emails"})
    await page.expect("subscribed", sub=5)
    job = new_job_id()
    await events.apublish_many("emails", [("progress", job, n) for n in range(1_000)])
    heard = []
    while (frame := await page.receive())["type"] == "event":
        heard.append(frame["data"])
        assert frame["number"] == len(heard) - 1
        await page.send({"type": "ack", "sub": 5, "cursor": frame["number"] + 1})
    assert frame == {"type": "gap", "sub": 5, "reason": "overflow"}
    assert heard == list(range(len(heard))) and len(heard) < 1_000
    await events.apublish("emails", "progress", job, "later")
    assert (await page.expect("event"))["data"] == "later"
    await page.close()


async def test_who_acknowledges_nothing_holds_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echomq_app.live.subscribed.HEARD_EVENTS", 1_000)
    woken: list[None] = []
    subscription = EventSubscription(Subscribe(sub=1, events="emails"), lambda: woken.append(None))
    await subscription.open()
    job = new_job_id()
    for _ in range(3):
        await events.apublish_many("emails", [("progress", job, n) for n in range(200)])
        await wait_until_async(lambda: len(woken) >= READY_EVENTS)
    assert len(subscription._ready) <= READY_EVENTS
    subscription.close()
