"""Who may open the websocket of live pages, and when it ends: real sessions, real permissions."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator
from importlib import import_module
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.contrib.auth import get_user_model, login, logout
from django.contrib.auth.models import Permission
from django.http import HttpRequest
from pytest_django.fixtures import Settings

from echomq_app.core.records import StreamRecord
from echomq_app.live.access import make_token
from echomq_app.live.consumers import EchoConsumer
from echomq_app.stream import Stream
from tests.live_client import LiveSocket

pytestmark = pytest.mark.django_db(transaction=True)

OURS = {"Host": "shop.example", "Origin": "http://shop.example"}


@pytest.fixture(autouse=True)
def _asks_often(settings: Settings) -> None:
    settings.ALLOWED_HOSTS = ["shop.example"]
    settings.ECHOMQ = {"AUTHORIZE_INTERVAL": 0.2}


@pytest.fixture
def user() -> Any:
    user = get_user_model().objects.create_user("ann", password="secret")
    user.user_permissions.add(Permission.objects.get(codename="view_record"))
    return user


def session_of(user: Any) -> HttpRequest:
    """Log a user in, and return the request that holds the session."""
    request = HttpRequest()
    request.session = import_module(django_settings.SESSION_ENGINE).SessionStore()
    login(request, user, backend="django.contrib.auth.backends.ModelBackend")
    request.session.save()
    return request


def cookie(request: HttpRequest) -> dict[str, str]:
    return {"Cookie": f"{django_settings.SESSION_COOKIE_NAME}={request.session.session_key}"}


@contextlib.asynccontextmanager
async def opened(headers: dict[str, str], consumer: Any = EchoConsumer) -> AsyncIterator[Any]:
    """Open a socket; give it, and whether it is somebody's."""
    socket = LiveSocket(consumer.as_asgi(), headers=headers)
    welcome = await socket.open()
    try:
        yield socket, welcome["user"]
    finally:
        await socket.close()


async def test_a_page_of_ours_is_its_user(user: Any) -> None:
    request = await sync_to_async(session_of)(user)
    async with opened(OURS | cookie(request)) as (page, somebody):
        assert somebody
        await page.subscribe("orders")
        await Stream("orders").aappend({"n": 1})
        assert len(await page.records(1)) == 1
        await page.send({"type": "subscribe", "sub": 2, "events": "emails"})
        await page.expect("error", sub=2, code="denied")


@pytest.mark.parametrize(
    "origin", [{}, {"Origin": "https://evil.example"}, {"Origin": "null"}], ids=str
)
async def test_a_cookie_on_a_foreign_page_is_nobodys(user: Any, origin: dict[str, str]) -> None:
    # The consumer is mounted without any origin validator.
    request = await sync_to_async(session_of)(user)
    headers = {"Host": "shop.example"} | origin | cookie(request)
    async with opened(headers) as (page, somebody):
        assert not somebody
        await page.send({"type": "subscribe", "sub": 1, "stream": "orders"})
        await page.expect("error", sub=1, code="unauthenticated")


async def test_nobody_may_read_by_default() -> None:
    async with opened(OURS) as (page, somebody):
        assert not somebody
        await page.send({"type": "subscribe", "sub": 1, "stream": "orders"})
        await page.expect("error", sub=1, code="unauthenticated")


async def test_a_token_in_the_first_frame(user: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = make_token(user)
    async with opened({"Host": "shop.example"}) as (page, somebody):
        assert not somebody
        await page.send({"type": "auth", "token": token})
        await page.expect("welcome", user=True)
        await page.subscribe("orders")
        # A subscribe in the same message waits for the token, too.
    async with opened({"Host": "shop.example"}) as (page, _):
        subscribe = {"type": "subscribe", "sub": 1, "stream": "orders"}
        await page.send({"type": "auth", "token": token}, subscribe)
        await page.expect("welcome", user=True)
        await page.expect("subscribed")
    assert token not in caplog.text


async def test_a_bad_token_changes_nothing(user: Any) -> None:
    request = await sync_to_async(session_of)(user)
    async with opened(OURS | cookie(request)) as (page, _):
        await page.subscribe("orders")
        await page.send({"type": "auth", "token": "x" + make_token(user)})
        await page.expect("error", code="bad_token", sub=None)
        await page.expect("welcome", user=True)
        await Stream("orders").aappend({"n": 1})
        assert len(await page.records(1)) == 1


async def test_logged_out_while_connected(user: Any) -> None:
    request = await sync_to_async(session_of)(user)
    async with opened(OURS | cookie(request)) as (page, _):
        await page.subscribe("orders")
        await sync_to_async(logout)(request)
        await page.expect("error", code="unauthenticated", sub=None)
        assert await page.closed() == 4401


async def test_logged_out_by_another_process(user: Any) -> None:
    request = await sync_to_async(session_of)(user)
    async with opened(OURS | cookie(request)) as (page, _):
        await page.subscribe("orders")
        await sync_to_async(request.session.delete)()  # no signal comes here
        await page.expect("error", code="unauthenticated", sub=None)
        assert await page.closed() == 4401


@pytest.mark.parametrize("asked", [1, 2], ids=["at the subscription", "later"])
async def test_logged_out_while_it_is_asked_what_the_user_may(user: Any, asked: int) -> None:
    request = await sync_to_async(session_of)(user)
    left = [asked]

    class LoggingOut(EchoConsumer):
        async def may(self, *question: Any) -> bool:
            left[0] -= 1
            if not left[0]:
                await sync_to_async(request.session.delete)()
            return await super().may(*question)

    async with opened(OURS | cookie(request), LoggingOut) as (page, _):
        await page.send({"type": "subscribe", "sub": 1, "stream": "orders"})
        if asked == 2:
            await page.expect("subscribed")
        await page.expect("error", code="unauthenticated", sub=None)
        assert await page.closed() == 4401


async def test_a_token_that_expires_while_connected(user: Any) -> None:
    async with opened({"Host": "shop.example"}) as (page, _):
        await page.send({"type": "auth", "token": make_token(user, max_age=1.5)})
        await page.expect("welcome", user=True)
        await page.subscribe("orders")
        await page.expect("error", code="unauthenticated", sub=None)
        assert await page.closed() == 4401


async def test_stripped_of_the_permission_while_connected(user: Any) -> None:
    request = await sync_to_async(session_of)(user)
    async with opened(OURS | cookie(request)) as (page, _):
        await page.subscribe("orders")
        await sync_to_async(user.user_permissions.clear)()
        await page.expect("error", code="denied", sub=1)
        await Stream("orders").aappend({"n": 1})
        assert await page.nothing()


async def test_what_a_user_sees_changes_while_connected(user: Any) -> None:
    @dataclasses.dataclass(frozen=True)
    class Nothing:
        key = "nothing"

        def __call__(self, record: StreamRecord) -> None:
            return None

    class StaffSeesAll(EchoConsumer):
        async def mask_for(self, identity: Any, stream: str) -> Any:
            return None if identity.user.is_staff else Nothing()

    user.is_staff = True
    await user.asave()
    request = await sync_to_async(session_of)(user)
    async with opened(OURS | cookie(request), StaffSeesAll) as (page, _):
        await page.subscribe("orders")
        await Stream("orders").aappend({"n": 1})
        assert len(await page.records(1)) == 1
        user.is_staff = False
        await user.asave()
        await page.expect("error", code="failed", sub=1)
        await page.subscribe("orders", sub=2, start="first")
        assert await page.nothing()
