"""Frames without records: what a filter that matches little is told of all that passes."""

from __future__ import annotations

from typing import Any

import pytest

from echomq_app.live.consumers import EchoConsumer
from echomq_app.live.limits import Limits
from echomq_app.stream import Stream
from tests.live_client import LiveSocket

pytestmark = pytest.mark.django_db(transaction=True)


class Few(EchoConsumer):
    limits = Limits(frames_at_once=20, frames_per_second=1)


@pytest.fixture(autouse=True)
def _small_frames(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.ECHOMQ = {"AUTHORIZE": lambda user, action, target: True}
    monkeypatch.setattr("echomq_app.live.reader.SKIPPED", 5)
    monkeypatch.setattr("echomq_app.live.subscribed.WINDOW_RECORDS", 10)
    monkeypatch.setattr("echomq_app.live.tail.PACE", 0)


async def test_each_may_be_acknowledged() -> None:
    """However many: they are no more than what the server says."""
    page = LiveSocket(Few.as_asgi())
    await page.open()
    await page.subscribe("orders", types=["none"])
    cursor = 0
    for _ in range(60):
        await Stream("orders").aappend_many([{"data": 0}] * 5)
        frame = await page.expect("records", records=[])
        assert frame["cursor"] > cursor
        cursor = frame["cursor"]
        await page.send({"type": "ack", "sub": 1, "cursor": cursor})
    assert await page.nothing()
    await page.close()


async def test_no_more_than_a_window_of_them_is_on_its_way() -> None:
    page = LiveSocket(EchoConsumer.as_asgi())
    await page.open()
    await page.subscribe("orders", types=["none"])
    for number in range(1, 16):
        await Stream("orders").aappend_many([{"data": 0}] * 5)
        if number <= 10:
            frame = await page.expect("records", records=[])
    assert await page.nothing()
    await page.send({"type": "ack", "sub": 1, "cursor": frame["cursor"]})
    assert (await page.expect("records", records=[]))["cursor"] > frame["cursor"]
    await page.close()
