"""Sessions, tokens and permissions: who a connection is, and what ends that."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import AnonymousUser, Group, Permission, User
from django.contrib.sessions.backends.db import SessionStore
from django.core import signing
from django.core.exceptions import PermissionDenied
from django.test import Client
from pytest_django.fixtures import Settings

from echomq_app.exceptions import BadToken, InvalidArgument
from echomq_app.live import access, logouts
from tests.unit.test_live_access import scope

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def user() -> User:
    return User.objects.create_user("ada", password="lovelace")


def logged_in(user: User) -> tuple[Client, dict[str, Any]]:
    """Return a browser with a session of this user, and the scope of its page's socket."""
    client = Client()
    client.force_login(user)
    return client, page_of(client)


def page_of(client: Client, **headers: str) -> dict[str, Any]:
    cookies = "; ".join(f"{name}={morsel.value}" for name, morsel in client.cookies.items())
    return scope(**{"origin": "http://shop.example", "cookie": cookies, **headers})


async def test_session_cookie_of_our_own_page(user: User) -> None:
    _, page = await sync_to_async(logged_in)(user)
    identity = await access.identify(page)
    assert identity.authenticated
    assert identity.user == user
    assert await identity.still_valid()


@pytest.mark.parametrize("origin", ["http://evil.example", "null"])
async def test_session_cookie_on_a_foreign_page_is_nobodys(
    user: User, origin: str, caplog: pytest.LogCaptureFixture
) -> None:
    client, _ = await sync_to_async(logged_in)(user)
    page = page_of(client, origin=origin)
    assert await access.identify(page) == access.NOBODY
    assert "event=foreign_origin" in caplog.text
    assert client.cookies["sessionid"].value not in caplog.text
    del page["headers"][1:2]  # the origin
    assert await access.identify(page) == access.NOBODY


async def test_unknown_and_expired_sessions_are_nobodys(user: User) -> None:
    client, page = await sync_to_async(logged_in)(user)
    unknown = scope(origin="http://shop.example", cookie="sessionid=" + "a" * 32)
    assert await access.identify(unknown) == access.NOBODY
    store = SessionStore(client.cookies["sessionid"].value)
    await store.aset_expiry(-1)
    await store.asave()
    assert await access.identify(page) == access.NOBODY


@pytest.mark.parametrize("engine", ["db", "cached_db", "cache", "file", "signed_cookies"])
async def test_every_kind_of_session(
    user: User, engine: str, settings: Settings, tmp_path: Path
) -> None:
    settings.SESSION_ENGINE = f"django.contrib.sessions.backends.{engine}"
    settings.SESSION_FILE_PATH = str(tmp_path)
    settings.SESSION_COOKIE_NAME = "shop"
    client, page = await sync_to_async(logged_in)(user)
    identity = await access.identify(page)
    assert identity.user == user
    await sync_to_async(client.logout)()
    assert not await identity.still_valid()
    assert await access.identify(page) == access.NOBODY


async def test_looking_never_changes_the_session(user: User, settings: Settings) -> None:
    """Django's own look renews it after a change of the secret key, and a socket has no cookie."""
    client, page = await sync_to_async(logged_in)(user)
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "new"
    identity = await access.identify(page)
    assert identity.user == user
    assert await identity.still_valid()
    assert await SessionStore().aexists(client.cookies["sessionid"].value)


def deactivate(user: User, client: Client) -> None:
    User.objects.filter(pk=user.pk).update(is_active=False)


def change_password(user: User, client: Client) -> None:
    user.set_password("babbage")
    user.save()


def delete(user: User, client: Client) -> None:
    user.delete()


def log_out(user: User, client: Client) -> None:
    client.logout()


def log_out_elsewhere(user: User, client: Client) -> None:
    SessionStore(client.cookies["sessionid"].value).delete()


@pytest.mark.parametrize("end", [deactivate, change_password, delete, log_out, log_out_elsewhere])
async def test_what_ends_a_session_ends_its_pages(
    user: User, end: Callable[[User, Client], None]
) -> None:
    client, page = await sync_to_async(logged_in)(user)
    identity = await access.identify(page)
    await sync_to_async(end)(user, client)
    assert not await identity.still_valid()
    assert not await access.allowed(identity, "stream.read", "orders")


@pytest.mark.parametrize("end", [deactivate, change_password, delete])
async def test_what_ends_a_token(user: User, end: Callable[[User, Client], None]) -> None:
    token = access.make_token(user)
    identity = await access.identify_token(token)
    assert identity.user == user
    assert await identity.still_valid()
    await sync_to_async(end)(user, Client())
    assert not await identity.still_valid()
    with pytest.raises(BadToken, match="may not log in"):
        await access.identify_token(token)


async def test_token_expires(user: User, settings: Settings) -> None:
    settings.ECHOMQ = {"TOKEN_MAX_AGE": 0.2}
    started = time.monotonic()
    token = access.make_token(user)
    identity = await access.identify_token(access.make_token(user, max_age=0.3))
    await asyncio.wait_for(access.until_recheck(identity), 30)  # not AUTHORIZE_INTERVAL
    assert time.monotonic() - started > 0.25
    assert not await identity.still_valid()
    with pytest.raises(BadToken, match="expired"):
        await access.identify_token(token)


async def test_token_survives_a_new_secret_key(user: User, settings: Settings) -> None:
    token = access.make_token(user)
    settings.SECRET_KEY_FALLBACKS = [settings.SECRET_KEY]
    settings.SECRET_KEY = "new"
    assert (await access.identify_token(token)).user == user
    settings.SECRET_KEY_FALLBACKS = []
    with pytest.raises(BadToken):
        await access.identify_token(token)


async def test_tokens_of_others_are_refused(user: User) -> None:
    good = access.make_token(user)
    body, _, signature = good.rpartition(":")
    claims = {"user": str(user.pk), "digest": "", "expires": time.time() + 60}
    for bad in (
        "",
        "x",
        "::",
        "\0",
        "é:é:é",
        good + "x",
        body,
        f"{body[:-1]}:{signature}",
        body + ":" + signature[::-1],
        signing.dumps(claims),
        signing.dumps(claims, salt="another"),
        signing.dumps(claims, salt="echomq.live.token", key="another"),
        "a" * 1_000_000,
    ):
        with pytest.raises(BadToken):
            await access.identify_token(bad)


async def test_token_tells_nothing_that_a_session_holds(user: User) -> None:
    content = signing.loads(access.make_token(user), salt="echomq.live.token")
    assert user.get_session_auth_hash() not in str(content)
    assert user.password not in str(content)


async def test_no_token_for_nobody(user: User) -> None:
    user.is_active = False
    for nobody in (user, User(username="unsaved"), AnonymousUser()):
        with pytest.raises(InvalidArgument):
            access.make_token(nobody)  # type: ignore[arg-type]
    user.is_active = True
    for age in (0, -1, float("nan")):
        with pytest.raises(InvalidArgument):
            access.make_token(user, max_age=age)


# Permission


async def grant(user: User, *codenames: str) -> None:
    permissions = Permission.objects.filter(
        content_type__app_label="echomq", codename__in=codenames
    )
    await user.user_permissions.aset([permission async for permission in permissions])


async def test_nobody_may_anything_by_default() -> None:
    for action in ("stream.read", "events.read"):
        assert not await access.allowed(access.NOBODY, action, "orders")


async def test_default_asks_djangos_permissions(user: User) -> None:
    identity = await access.identify_token(access.make_token(user))

    async def may() -> list[bool]:
        return [
            await access.allowed(identity, action, "orders")
            for action in ("stream.read", "events.read")
        ]

    assert await may() == [False, False]
    await grant(user, "view_record")
    assert await may() == [True, False]
    await grant(user, "view_job")
    assert await may() == [False, True]
    await grant(user)
    group = await Group.objects.acreate(name="readers")
    await group.permissions.aadd(await Permission.objects.aget(codename="view_record"))
    await user.groups.aadd(group)
    assert await may() == [True, False]
    await user.groups.aclear()
    assert await may() == [False, False]


async def test_superuser_may_until_deactivated() -> None:
    root = await User.objects.acreate_superuser("root", password="x")
    identity = await access.identify_token(access.make_token(root))
    assert await access.allowed(identity, "stream.read", "orders")
    await User.objects.aupdate(is_active=False)
    assert not await access.allowed(identity, "stream.read", "orders")


async def test_unknown_action_is_denied(user: User) -> None:
    await User.objects.aupdate(is_superuser=True)
    identity = await access.identify_token(access.make_token(user))
    assert not await access.allowed(identity, "stream.write", "orders")


asked: list[tuple[Any, ...]] = []


def only_public(user: Any, action: str, target: str) -> bool:
    asked.append((user, action, target, threading.current_thread()))
    return target.startswith("public.")


async def test_rule_of_the_project_by_its_path(settings: Settings) -> None:
    settings.ECHOMQ = {"AUTHORIZE": f"{__name__}.only_public"}
    asked.clear()
    assert await access.allowed(access.NOBODY, "stream.read", "public.news")
    assert not await access.allowed(access.NOBODY, "stream.read", "orders")
    user, *what, thread = asked[0]
    assert (user.is_authenticated, what) == (False, ["stream.read", "public.news"])
    assert thread is not threading.main_thread()  # it may ask the database


async def test_async_rule_runs_on_the_loop(settings: Settings, user: User) -> None:
    loop = asyncio.get_running_loop()

    async def rule(user: Any, action: str, target: str) -> bool:
        assert asyncio.get_running_loop() is loop
        return bool(user.username == target)

    settings.ECHOMQ = {"AUTHORIZE": rule}
    identity = await access.identify_token(access.make_token(user))
    assert await access.allowed(identity, "stream.read", "ada")
    assert not await access.allowed(identity, "stream.read", "orders")


async def test_rule_that_only_returns_a_coroutine_is_awaited(settings: Settings) -> None:
    async def deny(user: Any, action: str, target: str) -> bool:
        return False

    class Rule:
        async def __call__(self, user: Any, action: str, target: str) -> bool:
            return target == "news"

    def plain(user: Any, action: str, target: str) -> Any:
        return deny(user, action, target)

    settings.ECHOMQ = {"AUTHORIZE": plain}
    assert not await access.allowed(access.NOBODY, "stream.read", "news")
    settings.ECHOMQ = {"AUTHORIZE": Rule()}
    assert await access.allowed(access.NOBODY, "stream.read", "news")
    assert not await access.allowed(access.NOBODY, "stream.read", "orders")


async def test_rule_that_raises_gives_no_answer_and_is_logged(
    settings: Settings, user: User, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(user: Any, action: str, target: str) -> bool:
        raise LookupError("no such tenant")

    async def fails_later(user: Any, action: str, target: str) -> bool:
        raise LookupError("no such tenant")

    token = access.make_token(user)
    identity = await access.identify_token(token)
    for rule in (fails, fails_later, "no.such.rule"):
        settings.ECHOMQ = {"AUTHORIZE": rule}
        caplog.clear()
        with pytest.raises(access.Undecided):
            await access.allowed(identity, "stream.read", "orders")
        (record,) = [one for one in caplog.records if one.levelno >= logging.ERROR]
        assert "action=stream.read target='orders'" in record.getMessage()
        assert record.exc_info
        assert token not in caplog.text


async def test_rule_that_raises_permission_denied_denies(settings: Settings, user: User) -> None:
    def denies(user: Any, action: str, target: str) -> bool:
        raise PermissionDenied

    settings.ECHOMQ = {"AUTHORIZE": denies}
    identity = await access.identify_token(access.make_token(user))
    assert not await access.allowed(identity, "stream.read", "orders")
    assert not await sync_to_async(access.allowed_in_view)(identity, "stream.read", "orders")


async def test_rule_never_hears_of_a_user_who_is_gone(user: User, settings: Settings) -> None:
    settings.ECHOMQ = {"AUTHORIZE": lambda user, action, target: True}
    identity = await access.identify_token(access.make_token(user))
    assert await access.allowed(identity, "stream.read", "orders")
    await User.objects.aupdate(is_active=False)
    assert not await access.allowed(identity, "stream.read", "orders")


# Asking again


async def test_logout_is_heard_at_once_and_ends_the_session(user: User) -> None:
    """Django tells of it before it removes the session."""
    client, page = await sync_to_async(logged_in)(user)
    identity = await access.identify(page)
    before = set(logouts._callbacks)
    valid: list[bool] = []

    def look(pk: Any) -> None:
        assert pk == user.pk
        valid.append(identity.proof.load() is not None)

    unhook = access.on_logout(look)
    waiting = asyncio.create_task(access.until_recheck(identity))
    await asyncio.sleep(0)
    await sync_to_async(client.logout)()
    await asyncio.wait_for(waiting, 30)  # AUTHORIZE_INTERVAL is 60
    assert valid == [False]
    unhook()
    assert logouts._callbacks == before


async def test_logout_of_another_session_is_not_ours(user: User) -> None:
    _, page = await sync_to_async(logged_in)(user)
    other, _ = await sync_to_async(logged_in)(user)
    identity = await access.identify(page)
    await sync_to_async(other.logout)()
    assert await identity.still_valid()


async def test_asked_again_after_the_interval(settings: Settings) -> None:
    settings.ECHOMQ = {"AUTHORIZE_INTERVAL": 0.05}
    await asyncio.wait_for(access.until_recheck(access.NOBODY), 30)


async def test_waiting_that_is_cancelled_leaves_nothing(user: User) -> None:
    identity = await access.identify_token(access.make_token(user))
    before = set(logouts._callbacks)
    waiting = asyncio.create_task(access.until_recheck(identity))
    await asyncio.sleep(0)
    assert len(logouts._callbacks) == len(before) + 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert logouts._callbacks == before
