"""What a user may read is asked with the user as now; and no answer is neither a yes nor a no."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import OperationalError, connection
from django.test import Client
from pytest_django.fixtures import Settings

from echomq_app.core.pace import Pace
from echomq_app.core.records import StreamRecord
from echomq_app.live import access, sse
from echomq_app.live.consumers import EchoConsumer
from echomq_app.live.visits import in_shared_visit
from echomq_app.stream import Stream
from project.asgi import application
from tests.asgi_request import AsgiRequest
from tests.live_client import LiveSocket
from tests.wait import wait_until_async

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _site(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.ALLOWED_HOSTS = ["*"]
    settings.ROOT_URLCONF = "project.urls"
    monkeypatch.setattr(access, "_complaints", Pace(1.0))
    monkeypatch.setattr(access, "full_jitter", lambda *args, **more: 0.01)
    Stream("orders").append_many([{"data": {"n": n, "price": 100 + n}} for n in range(3)])


@pytest.fixture
def user() -> Any:
    user = get_user_model().objects.create_user("ann", password="secret", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_record"))
    return user


@dataclasses.dataclass(frozen=True)
class WithoutPrices:
    key = "no prices"

    def __call__(self, record: StreamRecord) -> StreamRecord | None:
        return msgspec.structs.replace(record, data={"n": record.data["n"]})


def for_staff(user: Any, stream: str) -> Any:
    return None if user.is_staff else WithoutPrices()


async def opened(user: Any, consumer: Any = EchoConsumer) -> LiveSocket:
    page = LiveSocket(consumer.as_asgi())
    await page.open()
    await page.send({"type": "auth", "token": access.make_token(user)})
    await page.expect("welcome", user=True)
    return page


class TestAsNow:
    async def test_a_mask_is_of_the_user_as_now(self, settings: Settings, user: Any) -> None:
        """S1: who was staff when the socket was opened, and subscribes again."""
        settings.ECHOMQ = {"MASK": for_staff}
        page = await opened(user)
        await page.subscribe("orders", start="first")
        assert "price" in (await page.records(3))[0]["data"]
        await page.send({"type": "unsubscribe", "sub": 1})
        await page.expect("unsubscribed")
        await get_user_model().objects.aupdate(is_staff=False)
        await page.subscribe("orders", start="first")
        assert [record["data"] for record in await page.records(3)] == [{"n": n} for n in range(3)]
        await page.close()

    async def test_hooks_get_the_user_as_now(self, user: Any) -> None:
        asked: list[tuple[str, bool]] = []

        class Asks(EchoConsumer):
            async def may(self, identity: Any, action: str, target: str) -> bool:
                asked.append(("may", identity.user.is_staff))
                return True

            async def mask_for(self, identity: Any, stream: str) -> Any:
                asked.append(("mask_for", identity.user.is_staff))
                return None

        page = await opened(user, Asks)
        await get_user_model().objects.aupdate(is_staff=False)
        await page.subscribe("orders")
        assert asked == [("may", False), ("mask_for", False)]
        await page.close()

    async def test_no_mask_is_asked_for_what_may_not_be_read(
        self, settings: Settings, user: Any
    ) -> None:
        asked: list[str] = []
        settings.ECHOMQ = {
            "AUTHORIZE": lambda user, action, target: False,
            "MASK": lambda user, stream: asked.append(stream),
        }
        page = await opened(user)
        await page.send({"type": "subscribe", "sub": 1, "stream": "orders"})
        await page.expect("error", code="denied")
        assert asked == []
        await page.close()


class Rule:
    """Says yes, no, or fails as a rule does whose database is away."""

    def __init__(self) -> None:
        self.answer: bool | Exception = True
        self.asked = 0

    def __call__(self, user: Any, action: str, target: str) -> bool:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


AWAY = [OperationalError("server closed the connection"), LookupError("no such tenant")]


@pytest.fixture
def rule(settings: Settings) -> Rule:
    rule = Rule()
    settings.ECHOMQ = {"AUTHORIZE": rule, "AUTHORIZE_INTERVAL": 0.1}
    return rule


@pytest.mark.parametrize("error", AWAY, ids=["database", "rule"])
class TestNoAnswer:
    async def test_at_a_subscription(self, rule: Rule, user: Any, error: Exception) -> None:
        rule.answer = error
        page = await opened(user)
        await page.send({"type": "subscribe", "sub": 1, "stream": "orders"})
        failed = await page.expect("error", code="failed", sub=1)
        assert "Try again soon" in failed["message"]
        rule.answer = True
        await page.subscribe("orders", start="first")
        await page.records(3)
        await page.close()

    async def test_for_a_moment_while_it_reads(
        self, rule: Rule, user: Any, error: Exception, settings: Settings
    ) -> None:
        """It goes on, is asked about again, and then a no is a no."""
        settings.ECHOMQ = {"AUTHORIZE": rule, "AUTHORIZE_INTERVAL": 0.2}
        page = await opened(user)
        await page.subscribe("orders")
        rule.answer, rule.asked = error, 0
        await wait_until_async(lambda: rule.asked >= 2)
        rule.answer = True
        asked = rule.asked
        await wait_until_async(lambda: rule.asked > asked)
        await Stream("orders").aappend({"n": 3})
        await page.records(1)
        rule.answer = False
        await page.expect("error", code="denied", sub=1)
        await page.close()

    async def test_for_too_long_while_it_reads(
        self, rule: Rule, user: Any, error: Exception
    ) -> None:
        page = await opened(user)
        await page.subscribe("orders")
        rule.answer = error
        await page.expect("error", code="failed", sub=1)
        await page.close()

    def test_a_page_in_json(self, rule: Rule, client: Client, error: Exception) -> None:
        rule.answer = error
        response = client.get("/echomq/streams/orders")
        assert (response.status_code, response["Retry-After"]) == (503, "5")
        assert response.json()["code"] == "failed"
        rule.answer = True
        assert client.get("/echomq/streams/orders").status_code == 200

    async def test_server_sent_events(self, rule: Rule, error: Exception) -> None:
        rule.answer = error
        async with AsgiRequest(application, "/echomq/streams/orders/events") as refused:
            await refused.ended()
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        rule.answer = True
        async with AsgiRequest(application, "/echomq/streams/orders/events") as stream:
            await stream.expect("subscribed")
            rule.answer = error
            assert (await stream.expect("ended")).data["code"] == "failed"


async def test_events_go_on_after_a_moment_without_an_answer(rule: Rule) -> None:
    identity = access.NOBODY
    task = asyncio.ensure_future(sse._until_forbidden(identity, "orders", None))
    rule.answer = OperationalError("away")
    await wait_until_async(lambda: rule.asked >= 1)
    rule.answer = True
    asked = rule.asked
    await wait_until_async(lambda: rule.asked > asked + 1)
    assert not task.done()
    rule.answer = False
    assert (await asyncio.wait_for(task, 30))[0] == "unauthenticated"


async def test_one_rule_that_fails_does_not_spare_the_others(user: Any) -> None:
    class Fails(EchoConsumer):
        denies = False

        async def may(self, identity: Any, action: str, target: str) -> bool:
            if self.denies and target == "a":
                raise LookupError(target)
            return not self.denies

    page = await opened(user, Fails)
    for sub, name in enumerate("ab"):
        await page.subscribe(name, sub=sub)
    Fails.denies = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(access, "until_recheck", _at_once)
        await page.send({"type": "auth", "token": access.make_token(user)})
        await page.expect("welcome")
        await page.expect("error", code="denied", sub=1)
    await page.close()


async def _at_once(*args: Any, **more: Any) -> None:
    await asyncio.sleep(0.01)


@pytest.mark.postgres
async def test_a_connection_that_breaks_fails_no_other_question() -> None:
    """They share a visit to one thread, and its connection."""
    reached, release = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert release.wait(30)

    def pid() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            return int(cursor.fetchone()[0])

    def break_it() -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    holding = asyncio.ensure_future(in_shared_visit(hold))
    await asyncio.to_thread(reached.wait, 30)
    questions: list[Callable[[], Any]] = [pid, break_it, pid, pid]
    asked = [asyncio.ensure_future(in_shared_visit(question)) for question in questions]
    await asyncio.sleep(0)
    release.set()
    await holding
    first, broken, *others = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(broken, OperationalError)
    assert all(isinstance(other, int) and other != first for other in others)


@pytest.mark.postgres
async def test_a_question_whose_connection_was_broken_is_asked_again() -> None:
    def session() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            return int(cursor.fetchone()[0])

    times: list[int] = []

    def ask() -> int:
        times.append(session())
        if len(times) == 1:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return times[-1]

    assert await in_shared_visit(ask) == times[1] != times[0]


async def test_a_database_that_is_away_closes_no_socket_for_good(
    user: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose it is can't be found out: it may connect again, and the log has one line."""

    class Away(EchoConsumer):
        async def who(self) -> Any:
            raise OperationalError("away")

    for _ in range(5):
        page = LiveSocket(Away.as_asgi())
        connected, _ = await page.raw.connect(timeout=10)
        assert connected
        await page.expect("error", code="failed")
        assert await page.closed() == 1011
    assert caplog.text.count("event=socket_failed") == 1
    assert "Traceback" not in caplog.text
    await sync_to_async(user.delete)()


async def test_a_rule_that_hangs_keeps_no_other_right(
    user: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "ANSWER_TIMEOUT", 0.2)
    monkeypatch.setattr(access, "until_recheck", _at_once)

    class Hangs(EchoConsumer):
        revoked = False

        async def may(self, identity: Any, action: str, target: str) -> bool:
            if self.revoked and target == "slow":
                await asyncio.Event().wait()
            return not self.revoked

    page = await opened(user, Hangs)
    for sub, name in enumerate(("slow", "orders")):
        await page.subscribe(name, sub=sub)
    Hangs.revoked = True
    await page.expect("error", code="denied", sub=1)
    await page.close()


async def test_a_rule_that_hangs_ends_events(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "ANSWER_TIMEOUT", 0.05)

    async def hangs(*question: Any) -> bool:
        await asyncio.Event().wait()
        return True

    monkeypatch.setattr(access, "allowed", hangs)
    ended = asyncio.wait_for(sse._until_forbidden(access.NOBODY, "orders", None), 30)
    assert (await ended)[0] == "failed"
