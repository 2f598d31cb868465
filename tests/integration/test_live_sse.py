"""Server-sent events: what comes, what is refused, and what ends them."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Permission, User
from django.contrib.sessions.backends.db import SessionStore
from django.db import OperationalError, connection
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import include, path
from pytest_django.fixtures import Settings

from echomq_app.core.ids import event_id
from echomq_app.core.pace import Pace
from echomq_app.exceptions import UnknownStream
from echomq_app.live import access, sse
from echomq_app.live.hub import hub_of_this_loop
from echomq_app.models.stream import Stream as StreamRow
from echomq_app.routing import http
from echomq_app.stream import Stream
from tests.asgi_request import AsgiRequest, SentEvent
from tests.wait import wait_until_async

pytestmark = pytest.mark.django_db(transaction=True)

ORDERS = "/echomq/streams/orders/events"


async def django(scope: Any, receive: Any, send: Any) -> None:
    """Stand for the application behind."""
    await send({"type": "http.response.start", "status": 299, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


application = http(django)


@pytest.fixture
def everybody(settings: Settings) -> None:
    settings.ECHOMQ = {"AUTHORIZE": lambda user, action, target: action == "stream.read"}


def asked(
    path: str = ORDERS,
    *,
    headers: dict[str, str] | None = None,
    start: str | None = None,
    **query: Any,
) -> AsgiRequest:
    if start is not None:
        query["from"] = start
    return AsgiRequest(application, path, headers=headers, **query)


async def append(*data: Any, **options: Any) -> list[str]:
    """Append records to `orders` and return their tokens."""
    records = [{"data": one, **options} for one in data]
    return [receipt.token for receipt in await Stream("orders").aappend_many(records)]


def contents(events: list[SentEvent]) -> list[Any]:
    return [event.data["data"] for event in events]


async def nobody_reads() -> None:
    hub = hub_of_this_loop()
    await wait_until_async(lambda: not hub._tails, 30, "no reader is left in the hub")


# What comes


@pytest.mark.usefixtures("everybody")
async def test_records_with_their_tokens_as_ids() -> None:
    tokens = await append({"n": 1}, {"n": 2}, type="placed", key="7")
    async with asked(start="first") as stream:
        first = await stream.expect("subscribed")
        assert stream.status == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "no-cache" in stream.headers["cache-control"]
        assert stream.headers["x-accel-buffering"] == "no"
        assert int(first.retry) > 0
        epoch = tokens[0].partition(":")[0]
        assert first.data == {
            "type": "subscribed",
            "epoch": epoch,
            "cursor": 0,
            "first": 0,
            "head": 2,
            "resume": f"{epoch}:0:",
            "recovered": True,
        }
        assert first.id == first.data["resume"]
        events = await stream.records(2)
        assert [event.id for event in events] == tokens
        record = events[0].data
        assert (record["type"], record["key"], record["data"]) == ("placed", "7", {"n": 1})
        tokens = await append({"n": 3})
        (event,) = await stream.records(1)
        assert (event.id, event.data["position"]) == (tokens[0], 2)
        assert not stream.complete
    await nobody_reads()


@pytest.mark.usefixtures("everybody")
async def test_subscribed_before_any_record_then_dropped_and_back() -> None:
    async with asked() as stream:
        first = await stream.expect("subscribed")
    await append(1, 2, 3)
    async with asked(headers={"Last-Event-ID": first.id}) as stream:
        assert (await stream.expect("subscribed")).data["recovered"]
        assert contents(await stream.records(3)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, [3]),
        ({"start": "head"}, [3]),
        ({"start": "1"}, [1, 2, 3]),
        ({"start": "first"}, [0, 1, 2, 3]),
        ({"resume": "the token of 1"}, [2, 3]),
    ],
)
@pytest.mark.usefixtures("everybody")
async def test_begins_at_the_head_or_where_it_is_told(
    query: dict[str, Any], expected: list[int]
) -> None:
    tokens = await append(0, 1, 2)
    if "resume" in query:
        query = {"resume": tokens[1]}
    async with asked(**query) as stream:
        await stream.expect("subscribed")
        await append(3)
        assert contents(await stream.records(len(expected))) == expected


@pytest.mark.usefixtures("everybody")
async def test_last_event_id_is_newer_than_the_url() -> None:
    """A browser asks for the same URL again, with what it has seen since in the header."""
    tokens = await append(0, 1, 2)
    async with asked(headers={"Last-Event-ID": tokens[1]}, resume=tokens[0]) as stream:
        await stream.expect("subscribed")
        assert contents(await stream.records(1)) == [2]


@pytest.mark.usefixtures("everybody")
async def test_filters_and_an_id_past_what_they_skipped() -> None:
    for number in range(4):
        await append(number, type="ab"[number % 2], key=str(number // 2))
    head = (await Stream("orders").ainfo()).token
    async with asked(types="a", start="first") as stream:
        await stream.expect("subscribed")
        assert contents(await stream.records(2)) == [0, 2]
        silent = await stream.event()
        assert (silent.id, silent.text) == (head, "")  # no data: browsers take note, and are silent
    async with asked(types=["a", "b"], key="1", start="first") as stream:
        await stream.expect("subscribed")
        assert contents(await stream.records(2)) == [2, 3]


@pytest.mark.sqlite  # PostgreSQL keeps the value, not the text
@pytest.mark.usefixtures("everybody")
async def test_text_with_line_ends_that_sql_has_written() -> None:
    await append({"a": 1})

    def insert() -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO echomq_record (id, stream_id, position, type, key, data, headers,"
                " idempotency_key, recorded_at) SELECT %s, stream_id, 1, type, key, %s, headers,"
                " '', recorded_at FROM echomq_record",
                [event_id(0, 1, 7).hex, '{\r\n "a": 1\n}'],
            )

    await sync_to_async(insert)()
    async with asked(start="first") as stream:
        await stream.expect("subscribed")
        assert contents(await stream.records(2)) == [{"a": 1}, {"a": 1}]


# Places that are none


async def trimmed(tokens: list[str]) -> str:
    await Stream("orders").atrim(max_records=1)
    return tokens[0]


async def another_epoch(tokens: list[str]) -> str:
    await Stream("orders").arotate_epoch()
    return tokens[0]


async def ahead(tokens: list[str]) -> str:
    epoch, _, tail = tokens[0].split(":")
    return f"{epoch}:99:{tail}"


async def diverged(tokens: list[str]) -> str:
    epoch, cursor, tail = tokens[0].split(":")
    return f"{epoch}:{cursor}:{int(tail, 16) ^ 1:08x}"


async def malformed(tokens: list[str]) -> str:
    return "garbage"


@pytest.mark.parametrize(
    ("spoil", "reason", "requested"),
    [
        (trimmed, "trimmed", 1),
        (another_epoch, "epoch", 1),
        (ahead, "ahead", 99),
        (diverged, "diverged", 1),
        (malformed, "malformed", None),
    ],
)
@pytest.mark.usefixtures("everybody")
async def test_a_place_that_is_none_any_more(
    spoil: Callable[[list[str]], Any], reason: str, requested: int | None
) -> None:
    tokens = await append(0, 1, 2)
    token = await spoil(tokens)
    info = await Stream("orders").ainfo()
    async with (
        asked(headers={"Last-Event-ID": token}) as stream,
        asked(resume=token) as by_query,
    ):
        first = await stream.expect("subscribed")
        assert first.data["recovered"] is False
        # Cut off here it has to come back with the old id, to hear of the loss then.
        assert first.id == ""
        assert "resume" not in first.data
        notice = await stream.expect("cursor_expired")
        assert notice.data == {
            "type": "cursor_expired",
            "reason": reason,
            "requested": requested,
            "first": info.first_position,
            "head": 3,
            "epoch": info.epoch,
            "cursor": 3,
            "resume": info.token,
        }
        assert notice.id == info.token
        await by_query.expect("subscribed")
        assert await by_query.expect("cursor_expired") == notice
        await append(3)
        assert contents(await stream.records(1)) == [3]


@pytest.mark.usefixtures("everybody")
async def test_another_life_of_the_stream_while_it_is_followed() -> None:
    await append(0, 1)
    async with asked() as stream:
        await stream.expect("subscribed")
        epoch = await Stream("orders").arotate_epoch()
        notice = await stream.expect("cursor_expired")
        assert (notice.data["reason"], notice.data["epoch"]) == ("epoch", epoch)
        tokens = await append(2)
        (event,) = await stream.records(1)
        assert event.id == tokens[0]  # of the new epoch


# Slow, silent, and gone


@pytest.mark.usefixtures("everybody")
async def test_heartbeats_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "HEARTBEAT", 0.05)
    async with asked(types="none") as stream:
        await stream.expect("subscribed")
        assert (await stream.event()).comment
        await append(1)  # filtered: wakes it, and says nothing
        assert (await stream.event()).comment
        assert (await stream.event()).comment


@pytest.mark.usefixtures("everybody")
async def test_a_client_that_goes_away_ends_its_reader_at_once() -> None:
    before = asyncio.all_tasks()
    async with asked() as stream:
        await stream.expect("subscribed")
        assert hub_of_this_loop()._tails
    await nobody_reads()
    # Also one that the server waits for.
    await append(0)
    async with asked(start="first") as stream:
        await stream.expect("subscribed")
        stream.reads.clear()
        await append(1)
    await nobody_reads()
    await wait_until_async(lambda: asyncio.all_tasks() <= before, 30, "its tasks have ended")


@pytest.mark.usefixtures("everybody")
async def test_a_slow_client_holds_up_nobody_and_nothing_piles_up() -> None:
    text = "x" * 1_000
    async with asked() as slow, asked() as fast:
        for stream in (slow, fast):
            await stream.expect("subscribed")
        slow.reads.clear()
        for _ in range(10):
            await append(*[text] * 200)
        await fast.records(2_000)
        before = len(slow.body)
        slow.reads.set()
        events = await slow.records(2_000)
        assert [event.data["position"] for event in events] == list(range(2_000))
        assert before < sse.PAGE_BYTES * 2


@pytest.mark.usefixtures("everybody")
async def test_a_stream_that_is_deleted_ends() -> None:
    await append(1)
    async with asked() as stream:
        await stream.expect("subscribed")
        await Stream("orders").adelete()
        ended = await stream.expect("ended")
        assert (ended.data["type"], ended.data["code"]) == ("error", "unknown_stream")
        assert ended.id == ""
        await stream.ended()


@pytest.mark.usefixtures("everybody")
async def test_a_fault_ends_it_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with asked() as stream:
        await stream.expect("subscribed")

        def broken(*arguments: object) -> None:
            raise RuntimeError("the disk is on fire")

        monkeypatch.setattr("echomq_app.live.hub.Reader.take", broken)
        await append(1)
        assert (await stream.expect("ended")).data["code"] == "failed"
        await stream.ended()
    assert "event=sse_failed stream=orders" in caplog.text
    await nobody_reads()


# Where it is


async def test_all_else_goes_to_django() -> None:
    for address, method in (
        ("/", "GET"),
        ("/events", "GET"),
        ("/echomq/streams/orders", "GET"),
        ("/echomq/streams/a/b/events", "GET"),
        ("/elsewhere/streams/orders/events", "GET"),
        (ORDERS, "POST"),
        (ORDERS, "HEAD"),
    ):
        request = asked(address)
        request.scope["method"] = method
        async with request:
            await request.ended()
        assert (request.status, request.body) == (299, address.encode())


async def test_other_kinds_of_connection_go_to_django() -> None:
    seen = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    for kind in ("lifespan", "websocket"):
        await http(inner)({"type": kind, "path": ORDERS}, None, None)
    assert seen == ["lifespan", "websocket"]


def other(request: HttpRequest, name: str) -> HttpResponse:
    """Be a view of the project's own whose route has the same name."""
    return HttpResponse(name)


urlpatterns = [
    path("live/", include("echomq_app.urls")),
    path("<str:name>/events", other, name="events"),
]


@pytest.mark.usefixtures("everybody")
async def test_it_is_where_the_urls_are_mounted(settings: Settings) -> None:
    settings.ROOT_URLCONF = __name__
    async with asked("/live/streams/orders/events") as stream:
        await stream.expect("subscribed")
    below = asked("/shop/live/streams/orders/events")
    below.scope["root_path"] = "/shop"
    async with below as stream:
        await stream.expect("subscribed")
    for elsewhere in (ORDERS, "/orders/events"):
        async with asked(elsewhere) as request:
            await request.ended()
        assert request.status == 299


# Who may


async def refusal(request: AsgiRequest) -> tuple[int, str]:
    async with request:
        await request.ended()
    error = json.loads(request.body)
    assert error["type"] == "error"
    assert request.headers["content-type"] == "application/json"
    assert int(request.headers["content-length"]) == len(request.body)
    return request.status, error["code"]


@pytest.fixture
def user() -> User:
    user = User.objects.create_user("ada", password="lovelace")
    user.user_permissions.add(Permission.objects.get(codename="view_record"))
    return user


def browser_of(user: User) -> tuple[Client, dict[str, str]]:
    client = Client()
    client.force_login(user)
    return client, {"cookie": f"sessionid={client.cookies['sessionid'].value}"}


async def test_nobody_reads_by_default_and_no_stream_is_made(user: User) -> None:
    assert await refusal(asked()) == (403, "unauthenticated")
    await user.user_permissions.aclear()
    _, cookie = await sync_to_async(browser_of)(user)
    assert await refusal(asked(headers=cookie)) == (403, "denied")
    assert not await StreamRow.objects.aexists()


async def test_session_cookie_of_our_own_page(user: User) -> None:
    _, cookie = await sync_to_async(browser_of)(user)
    for headers in (cookie, {**cookie, "origin": "http://testserver"}):
        async with asked(headers=headers) as stream:
            await stream.expect("subscribed")


async def test_session_cookie_on_a_foreign_page_is_nobodys(user: User) -> None:
    _, cookie = await sync_to_async(browser_of)(user)
    for sign in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert await refusal(asked(headers={**cookie, **sign})) == (403, "unauthenticated")


async def test_token_in_the_header(user: User) -> None:
    headers = {"authorization": f"Bearer {access.make_token(user)}"}
    async with asked(headers={**headers, "origin": "http://elsewhere.example"}) as stream:
        await stream.expect("subscribed")
    await User.objects.aupdate(is_active=False)
    request = asked(headers=headers)
    assert await refusal(request) == (401, "bad_token")
    assert request.headers["www-authenticate"].startswith("Bearer")


async def test_no_token_in_a_url(user: User) -> None:
    token = access.make_token(user)
    for parameter in ("token", "access_token", "authorization"):
        query: dict[str, Any] = {parameter: token}
        request = asked(**query)
        assert await refusal(request) == (400, "bad_request")
        assert b"Authorization: Bearer" in request.body
        assert token.encode() not in request.body


@pytest.mark.usefixtures("everybody")
async def test_bad_requests() -> None:
    assert await refusal(asked("/echomq/streams/a b/events")) == (404, "bad_name")
    for request in (asked(resume="x", start="first"), asked(limit=1), asked(key="\0")):
        assert await refusal(request) == (400, "bad_request")


async def test_query_and_host_that_are_garbage(settings: Settings) -> None:
    request = asked()
    request.scope["query_string"] = b"\xff=\xff"
    assert (await refusal(request))[0] == 400
    settings.ALLOWED_HOSTS = ["elsewhere.example"]
    assert await refusal(asked()) == (400, "bad_request")


def log_out(user: User, client: Client) -> None:
    SessionStore(client.cookies["sessionid"].value).delete()


def deactivate(user: User, client: Client) -> None:
    User.objects.filter(pk=user.pk).update(is_active=False)


def change_password(user: User, client: Client) -> None:
    user.set_password("babbage")
    user.save()


def withdraw(user: User, client: Client) -> None:
    user.user_permissions.clear()


@pytest.mark.parametrize(
    ("kind", "withdrawn", "code"),
    [
        ("session", log_out, "unauthenticated"),
        ("session", deactivate, "unauthenticated"),
        ("session", change_password, "unauthenticated"),
        ("session", withdraw, "denied"),
        ("token", deactivate, "unauthenticated"),
        ("token", change_password, "unauthenticated"),
        ("token", withdraw, "denied"),
    ],
)
async def test_ends_when_it_is_asked_about_again(
    user: User,
    settings: Settings,
    kind: str,
    withdrawn: Callable[[User, Client], None],
    code: str,
) -> None:
    settings.ECHOMQ = {"AUTHORIZE_INTERVAL": 0.1}
    client, headers = await sync_to_async(browser_of)(user)
    if kind == "token":
        headers = {"authorization": f"Bearer {access.make_token(user)}"}
    async with asked(headers=headers) as stream:
        await stream.expect("subscribed")
        await append(1)
        await stream.records(1)
        await sync_to_async(withdrawn)(user, client)
        assert (await stream.expect("ended")).data["code"] == code
        await stream.ended()
        await append(2)
        assert b'"data":2' not in stream.body
    await nobody_reads()
    assert (await refusal(asked(headers=headers)))[0] in (401, 403)


async def test_ends_with_its_token(user: User) -> None:
    headers = {"authorization": f"Bearer {access.make_token(user, max_age=1)}"}
    async with asked(headers=headers) as stream:
        await stream.expect("subscribed")
        assert (await stream.expect("ended")).data["code"] == "unauthenticated"


async def test_a_logout_in_this_process_ends_it_at_once(user: User) -> None:
    client, headers = await sync_to_async(browser_of)(user)
    async with asked(headers=headers) as stream:
        await stream.expect("subscribed")
        await sync_to_async(client.logout)()
        assert (await stream.expect("ended")).data["code"] == "unauthenticated"  # not after 60 s


async def test_ends_for_a_client_that_does_not_read(
    user: User, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "LAST_WORDS", 0.05)
    settings.ECHOMQ = {"AUTHORIZE_INTERVAL": 0.1}
    _, headers = await sync_to_async(browser_of)(user)
    async with asked(headers=headers) as stream:
        await stream.expect("subscribed")
        stream.reads.clear()
        await append(1)
        await sync_to_async(withdraw)(user, Client())
        await asyncio.wait_for(stream.task, 30)
    await nobody_reads()


async def test_a_rule_that_raises_is_no_refusal(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async def rule(user: Any, action: str, target: str) -> bool:
        raise LookupError

    settings.ECHOMQ = {"AUTHORIZE": rule}
    request = asked()
    assert await refusal(request) == (503, "failed")
    assert request.headers["retry-after"] == "5"
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@dataclasses.dataclass(frozen=True)
class NoDatabase:
    """A session whose store can't be reached."""

    expires_at: float | None = None

    def load(self) -> User | None:
        raise OperationalError("the database is away")


async def test_a_database_that_is_away_is_no_logout(
    settings: Settings,
    user: User,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(access, "_complaints", Pace(1.0))
    settings.ECHOMQ = {"AUTHORIZE_INTERVAL": 0.05}
    identity = access.Identity(user=user, proof=NoDatabase())
    code, _ = await asyncio.wait_for(sse._until_forbidden(identity, "orders", None), 30)
    assert code == "failed"
    assert caplog.text.count("event=recheck_failed") == 1, "one line, however often it asks"


@pytest.mark.sqlite
async def test_a_database_that_is_away_at_the_start(user: User) -> None:
    _, cookie = await sync_to_async(browser_of)(user)

    def take_away(new: str, old: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")

    await sync_to_async(take_away)("away", "django_session")
    try:
        request = asked(headers=cookie)
        assert await refusal(request) == (503, "failed")
        assert request.headers["retry-after"]
    finally:
        await sync_to_async(take_away)("django_session", "away")


def test_routing_loads_without_a_project_that_has_pages() -> None:
    script = (
        "import django; from django.conf import settings;"
        "settings.configure(INSTALLED_APPS=['django.contrib.contenttypes', 'django.contrib.auth',"
        " 'echomq_app'], ROOT_URLCONF='echomq_app.urls', SECRET_KEY='x');"
        "django.setup(); import echomq_app.routing"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=root, check=True)


async def test_a_stream_that_is_deleted_while_it_is_opened(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ECHOMQ = {"AUTHORIZE": lambda user, action, target: True}

    async def deleted(*args: Any, **options: Any) -> Any:
        raise UnknownStream("orders")

    monkeypatch.setattr("echomq_app.live.hub.Hub.open", deleted)
    assert await refusal(asked()) == (404, "unknown_stream")
