"""What a user sees of a record: the same rule on sockets, server-sent events and JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import msgspec
import pytest
from django.test import Client
from pytest_django.fixtures import Settings

from echomq_app.core.records import StreamRecord
from echomq_app.live.consumers import EchoConsumer
from echomq_app.stream import Stream
from project.asgi import application
from tests.asgi_request import AsgiRequest
from tests.live_client import LiveSocket

pytestmark = pytest.mark.django_db(transaction=True)


@dataclasses.dataclass(frozen=True)
class WithoutPrices:
    """Leaves out prices, and every second record."""

    key = "no prices"

    def __call__(self, record: StreamRecord) -> StreamRecord | None:
        if record.position % 2:
            return None
        return msgspec.structs.replace(record, data={"n": record.data["n"]})


class Broken:
    """Fails."""

    key = "broken"

    def __call__(self, record: StreamRecord) -> StreamRecord | None:
        raise RuntimeError("broken")


def without_prices(user: Any, stream: str) -> Any:
    assert user.is_anonymous and stream == "orders"
    return WithoutPrices()


async def without_prices_async(user: Any, stream: str) -> Any:
    return without_prices(user, stream)


def broken_rule(user: Any, stream: str) -> Any:
    raise RuntimeError("the rule is broken")


@pytest.fixture(autouse=True)
def _orders(settings: Settings) -> None:
    settings.ALLOWED_HOSTS = ["*"]
    settings.ROOT_URLCONF = "project.urls"
    Stream("orders").append_many([{"data": {"n": n, "price": 100 + n}} for n in range(4)])


def use(settings: Settings, rule: Any) -> None:
    settings.ECHOMQ = {"AUTHORIZE": lambda user, action, target: True, "MASK": rule}


RULES = [without_prices, without_prices_async, f"{__name__}.without_prices"]


@pytest.mark.parametrize("rule", RULES, ids=["sync", "async", "path"])
async def test_the_socket(settings: Settings, rule: Any) -> None:
    use(settings, rule)
    page = LiveSocket(EchoConsumer.as_asgi())
    await page.open()
    await page.subscribe("orders", start="first")
    records = await page.records(2)
    assert [record["data"] for record in records] == [{"n": 0}, {"n": 2}]
    assert page.resume == (await Stream("orders").ainfo()).token
    await page.close()


@pytest.mark.parametrize("rule", RULES, ids=["sync", "async", "path"])
def test_a_page_in_json(settings: Settings, client: Client, rule: Any) -> None:
    use(settings, rule)
    page = client.get("/echomq/streams/orders").json()
    assert [record["data"] for record in page["records"]] == [{"n": 0}, {"n": 2}]
    assert page["cursor"] == 4


@pytest.mark.parametrize("rule", RULES, ids=["sync", "async", "path"])
async def test_server_sent_events(settings: Settings, rule: Any) -> None:
    use(settings, rule)
    query: dict[str, Any] = {"from": "first"}
    async with AsgiRequest(application, "/echomq/streams/orders/events", **query) as request:
        await request.expect("subscribed")
        records = await request.records(2)
    assert [record.data["data"] for record in records] == [{"n": 0}, {"n": 2}]
    assert b"price" not in request.body


@pytest.mark.parametrize("rule", [broken_rule, lambda user, stream: Broken()], ids=["rule", "mask"])
async def test_what_fails_shows_nothing_on_a_socket(settings: Settings, rule: Any) -> None:
    use(settings, rule)
    page = LiveSocket(EchoConsumer.as_asgi())
    await page.open()
    await page.send({"type": "subscribe", "sub": 1, "stream": "orders", "from": "first"})
    frames = [await page.receive()]
    while frames[-1]["type"] != "error":
        frames.append(await page.receive())
    assert frames[-1]["code"] == "failed"
    assert "price" not in json.dumps(frames)
    await page.close()


@pytest.mark.parametrize("rule", [broken_rule, lambda user, stream: Broken()], ids=["rule", "mask"])
def test_what_fails_shows_nothing_in_json(settings: Settings, client: Client, rule: Any) -> None:
    use(settings, rule)
    client.raise_request_exception = False
    response = client.get("/echomq/streams/orders")
    assert response.status_code == 500
    assert b"price" not in response.content
