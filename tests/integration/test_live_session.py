"""One socket's session, at the moments that seldom come: what meets what, and what ends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from echomq_app.live import access
from echomq_app.live.access import NOBODY, Identity
from echomq_app.live.limits import Limits
from echomq_app.live.session import Session
from echomq_app.models import paging
from echomq_app.stream import Stream
from tests.wait import wait_until_async

pytestmark = pytest.mark.django_db(transaction=True)


class GatedSocket:
    """A socket whose sends wait while its gate is closed."""

    def __init__(self) -> None:
        self.limits = Limits()
        self.sent: list[dict[str, Any]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.closes_at: dict[str, Any] | None = None
        self.closed: int | None = None

    async def send_text(self, text: str) -> None:
        frame = json.loads(text)
        self.sent.append(frame)
        wanted = self.closes_at
        if wanted is not None and wanted.items() <= frame.items():
            self.closes_at = None
            self.gate.clear()
        await self.gate.wait()

    async def close_with(self, code: int) -> None:
        self.closed = code

    async def who(self) -> Identity:
        return NOBODY

    async def may(self, identity: Identity, action: str, target: str) -> bool:
        return True

    async def mask_for(self, identity: Identity, stream: str) -> None:
        return None

    def of(self, sub: int) -> list[str]:
        return [frame["type"] for frame in self.sent if frame.get("sub") == sub]


@pytest_asyncio.fixture
async def socket() -> GatedSocket:
    return GatedSocket()


@pytest_asyncio.fixture
async def session(socket: GatedSocket) -> AsyncIterator[Session]:
    session = Session(socket)
    session.start()
    yield session
    socket.gate.set()
    await asyncio.wait_for(session.stop(), 10)


def say(session: Session, *frames: dict[str, Any]) -> None:
    session.handle(json.dumps(list(frames)))


async def test_subscribed_comes_first_though_another_is_being_sent(
    socket: GatedSocket, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        await Stream(name).aappend_many([{"data": n} for n in range(10)])
    may_open = threading.Event()
    read_info = paging.read_info

    def slow(using: str, name: str) -> Any:
        if name == "b":
            assert may_open.wait(30)
        return read_info(using, name)

    monkeypatch.setattr(paging, "read_info", slow)
    socket.closes_at = {"type": "records", "sub": 1}
    say(
        session,
        {"type": "subscribe", "sub": 1, "stream": "a", "from": 0},
        {"type": "subscribe", "sub": 2, "stream": "b", "resume": "none"},
    )
    await wait_until_async(lambda: not socket.gate.is_set())
    may_open.set()
    await wait_until_async(lambda: 2 not in session._opening)
    socket.gate.set()
    await wait_until_async(lambda: len(socket.of(2)) == 2)
    assert socket.of(2) == ["subscribed", "cursor_expired"]


async def test_nothing_follows_the_end_of_a_session_but_its_reason(
    socket: GatedSocket, session: Session
) -> None:
    for name in ("a", "b"):
        await Stream(name).aappend_many([{"data": n} for n in range(10)])
    socket.closes_at = {"type": "records"}
    say(session, *({"type": "subscribe", "sub": n, "stream": "ab"[n], "from": 0} for n in (0, 1)))
    await wait_until_async(lambda: not socket.gate.is_set() and not session._opening)
    before = len(socket.sent)
    session._end(4401, "unauthenticated", "over")
    socket.gate.set()
    await wait_until_async(lambda: socket.closed is not None)
    after = [frame["type"] for frame in socket.sent[before:] if frame["type"] != "subscribed"]
    assert after == ["error"]


@pytest.mark.parametrize("turns", range(5))
async def test_a_session_ends_whatever_its_writer_has_just_heard(
    socket: GatedSocket, session: Session, turns: int
) -> None:
    await wait_until_async(lambda: bool(socket.sent))
    session._writer.wake()
    for _ in range(turns):
        await asyncio.sleep(0)
    await asyncio.wait_for(session.stop(), 10)


@pytest.mark.parametrize("turns", range(5))
async def test_the_wait_for_the_next_look_ends_when_it_is_cancelled(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def on_logout(call: Any) -> Any:
        told.append(call)
        return lambda: None

    monkeypatch.setattr(access, "on_logout", on_logout)
    identity = Identity(user=Somebody(), proof=NOBODY.proof)  # type: ignore[arg-type]
    waits = asyncio.ensure_future(access.until_recheck(identity))
    await wait_until_async(lambda: bool(told))
    told[0](7)
    for _ in range(turns):
        await asyncio.sleep(0)
    if not waits.done():
        waits.cancel()
        await asyncio.wait([waits])
        assert waits.cancelled()


class Somebody:
    pk = 7
    is_authenticated = True


class HasLoggedIn:
    expires_at = None

    def load(self) -> Any:
        return Somebody()


async def test_a_client_that_asks_and_does_not_read_is_given_up(
    socket: GatedSocket, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echomq_app.live.writer.UNSENT", 20)
    monkeypatch.setattr("echomq_app.live.writer.LAST_WORDS", 0.05)
    await wait_until_async(lambda: bool(socket.sent))
    socket.closes_at = {"type": "pong"}
    for _ in range(100):
        say(session, {"type": "ping"})
    assert len(session._writer._answers) < 30
    await wait_until_async(lambda: socket.closed == 4429)


async def test_a_socket_that_takes_nothing_is_closed_all_the_same(
    socket: GatedSocket, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echomq_app.live.writer.LAST_WORDS", 0.05)
    await wait_until_async(lambda: bool(socket.sent))
    socket.closes_at = {"type": "pong"}
    say(session, {"type": "ping"})
    await wait_until_async(lambda: not socket.gate.is_set())
    session._end(4401, "unauthenticated", "over")
    await wait_until_async(lambda: socket.closed == 4401)


async def test_a_send_that_does_not_end_is_no_acknowledgement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echomq_app.live.session.LOOK_EVERY", 0.05)
    monkeypatch.setattr("echomq_app.live.writer.LAST_WORDS", 0.05)
    socket = GatedSocket()
    socket.limits = Limits(ack_timeout=0.1)
    socket.closes_at = {"type": "welcome"}
    session = Session(socket)
    session.start()
    await wait_until_async(lambda: socket.closed == 4408)
    await session.stop()


async def test_who_asks_and_is_denied_reads_nothing() -> None:
    class Denying(GatedSocket):
        asked = 0

        async def may(self, identity: Identity, action: str, target: str) -> bool:
            self.asked += 1
            if self.asked == 1:
                await self.gate.wait()
            return False

    socket = Denying()
    socket.limits = Limits(login_timeout=0.1)
    session = Session(socket)
    session.start()
    await wait_until_async(lambda: bool(socket.sent))
    socket.gate.clear()
    say(session, {"type": "subscribe", "sub": 1, "stream": "a"})
    await asyncio.sleep(0.3)  # past the first look
    socket.gate.set()
    await wait_until_async(lambda: socket.closed == 4401)
    await session.stop()


async def test_somebody_else_by_the_time_that_it_may() -> None:
    """A subscription is of who the socket is when it begins, not of who it was."""
    asked: list[Any] = []

    class Asking(GatedSocket):
        async def may(self, identity: Identity, action: str, target: str) -> bool:
            asked.append(identity)
            if len(asked) == 1:
                await self.gate.wait()
            return not identity.authenticated

    socket = Asking()
    session = Session(socket)
    session.start()
    await wait_until_async(lambda: bool(socket.sent))
    socket.gate.clear()
    say(session, {"type": "subscribe", "sub": 1, "stream": "a"})
    await wait_until_async(lambda: bool(asked))
    other = Identity(user=Somebody(), proof=HasLoggedIn())  # type: ignore[arg-type]

    async def become() -> Identity:
        return other

    session._become(become())
    socket.gate.set()
    await wait_until_async(lambda: bool(socket.of(1)))
    assert socket.of(1) == ["error"] and asked[-1].authenticated
    await session.stop()


async def test_a_rule_is_asked_about_names_alone() -> None:
    asked: list[str] = []

    class Asking(GatedSocket):
        async def may(self, identity: Identity, action: str, target: str) -> bool:
            asked.append(target)
            return True

    socket = Asking()
    session = Session(socket)
    session.start()
    say(session, {"type": "subscribe", "sub": 1, "stream": "a\u0000"})
    say(session, {"type": "subscribe", "sub": 2, "events": "no spaces"})
    await wait_until_async(lambda: socket.of(1) == socket.of(2) == ["error"])
    assert asked == []
    assert {frame["code"] for frame in socket.sent if frame["type"] == "error"} == {"bad_name"}
    await session.stop()


async def test_who_becomes_somebody_else_is_asked_about_at_once() -> None:
    """What a socket reads is what its user may, from `auth` on."""
    other = Identity(user=Somebody(), proof=HasLoggedIn())  # type: ignore[arg-type]

    class Asking(GatedSocket):
        async def may(self, identity: Identity, action: str, target: str) -> bool:
            return not identity.authenticated

    async def become() -> Identity:
        return other

    socket = Asking()
    session = Session(socket)
    session.start()
    say(session, {"type": "subscribe", "sub": 1, "stream": "a"})
    await wait_until_async(lambda: socket.of(1) == ["subscribed"])
    session._become(become())
    await wait_until_async(lambda: socket.of(1) == ["subscribed", "error"])
    await session.stop()
