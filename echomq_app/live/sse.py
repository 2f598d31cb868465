"""Server-sent events: a stream of records over plain HTTP, for `EventSource` and curl.

An ASGI application of its own, in front of Django: a view would hold a thread and a database
connection for each open stream. Here an open stream is a task, and a cursor in the hub.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping
from typing import Any

import msgspec
from django.core.exceptions import DisallowedHost
from django.db import Error as DatabaseError
from django.http import QueryDict

from ..core import server_sent
from ..core.frames import record_head
from ..core.ids import EventId
from ..core.tokens import ResumeToken
from ..exceptions import BadToken, UnknownStream
from . import access, answers
from .answers import Refused, Wanted, refused, unavailable
from .hub import Batch, Expired, Reader, hub_of_this_loop
from .items import mask_key
from .masks import mask_of
from .pushback import Pushback, pushback_of

logger = logging.getLogger("echomq.live")

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Reason = tuple[str, str]
"""Code and message of an `error` frame."""

HEARTBEAT = 15.0
"""Seconds of silence after which a comment is sent: proxies cut what is silent for long."""
RETRY = 3_000
"""Milliseconds after which a browser connects again."""
PAGE, PAGE_BYTES = 100, 64_000
"""What the server gets at once. The next is made when that is on its way."""
LAST_WORDS = 5.0
"""Seconds for the event that says why a stream ends: the client may not be reading."""

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-store",
    "X-Accel-Buffering": "no",
    "X-Content-Type-Options": "nosniff",
}


async def serve(scope: Mapping[str, Any], name: str, receive: Receive, send: Send) -> None:
    """Answer a request for the records of a stream, until either side has had enough."""
    await _first_of(_gone(receive), _answer(scope, name, send))


async def _answer(scope: Mapping[str, Any], name: str, send: Send) -> None:
    try:
        identity, question = await _admit(scope, name)
    except Refused as refusal:
        await _refuse(send, refusal)
        return
    woken = asyncio.Event()
    try:
        mask = await mask_of(identity, name)
        reader = await hub_of_this_loop().open(
            name,
            question.place,
            types=question.types,
            key=question.key,
            mask=mask,
            wake=woken.set,
        )
    except UnknownStream as error:  # deleted while it was opened
        await _refuse(send, refused(404, "unknown_stream", str(error)))
        return
    except DatabaseError as error:
        await _refuse(send, unavailable(error))
        return
    try:
        with pushback_of(send) as pushback:
            stream = EventStream(name, reader, woken, send, pushback)
            await stream.begin()
            reason = await _first_of(
                stream.follow(), _until_forbidden(identity, name, mask_key(mask))
            )
        await stream.end(*reason)
    finally:
        reader.close()


async def _admit(scope: Mapping[str, Any], name: str) -> tuple[access.Identity, Wanted]:
    """Find out who asks for what; raise `Refused` if they may not have it."""
    request = access.request_of(scope)
    try:
        request.get_host()
        query = QueryDict(scope.get("query_string", b""))
    except (DisallowedHost, UnicodeDecodeError) as error:
        raise refused(400, "bad_request", str(error)) from None
    question = answers.wanted(name, query, ("resume", "from"), ())
    last_seen = request.headers.get("Last-Event-ID")
    if last_seen:  # Newer than the URL, which EventSource asks for again as it is.
        question = dataclasses.replace(question, place=last_seen)
    token = access.bearer_token(request)
    try:
        who = access.identify(scope) if token is None else access.identify_token(token)
        identity = await who
        may = await access.allowed(identity, "stream.read", name)
    except BadToken as error:
        raise answers.bad_token(error) from None
    except (access.Undecided, DatabaseError) as error:
        raise unavailable(error) from None
    if not may:
        raise answers.forbidden(identity, name)
    return identity, question


class EventStream:
    """One response that goes on: what its reader takes, as events."""

    def __init__(
        self, name: str, reader: Reader, woken: asyncio.Event, send: Send, pushback: Pushback
    ) -> None:
        self._name = name
        self._reader = reader
        self._woken = woken
        self._send = send
        self._pushback = pushback

    async def begin(self) -> None:
        """Say where the stream begins, so that there is an id before any record."""
        await self._send(_start(200, _HEADERS))
        opened = self._reader.opened
        subscribed = {"type": "subscribed", **dataclasses.asdict(opened)}
        place = opened.resume
        if not opened.recovered:
            # Until `cursor_expired` has come too, only the old id tells of the loss.
            place = ""
            del subscribed["resume"]
        body = msgspec.json.encode(subscribed)
        await self._write(server_sent.event(body, id=place, name="subscribed", retry=RETRY))

    async def follow(self) -> Reason:
        """Write what comes, and heartbeats; return when no more can come."""
        spoke = time.monotonic()
        while True:
            self._woken.clear()
            try:
                taken = self._reader.take(PAGE, PAGE_BYTES)
            except UnknownStream as error:
                return "unknown_stream", str(error)
            except Exception:
                logger.exception("event=sse_failed stream=%s", self._name)
                return "failed", "The server failed. Connect again with the last id."
            text = b""
            if taken is None:
                silence = time.monotonic() - spoke
                # Not wait_for: see until_recheck.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, HEARTBEAT - silence)):
                        await self._woken.wait()
                if time.monotonic() - spoke >= HEARTBEAT:
                    text = server_sent.COMMENT
            elif isinstance(taken, Batch):
                text = self._records(taken)
            else:
                text = self._expired(taken)
            if text:
                await self._write(text)
                spoke = time.monotonic()

    async def end(self, code: str, message: str) -> None:
        """Say why it ends, and end it."""
        body = server_sent.event(answers.error_body(code, message), name="ended")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS):
                await self._send(_body(body))

    async def _write(self, text: bytes) -> None:
        await self._send(_body(text, more=True))
        await self._pushback.wait()
        await asyncio.sleep(0)  # neither need have waited, and others wait too

    @staticmethod
    def _records(batch: Batch) -> bytes:
        events = []
        token = ""
        for raw in batch.records:
            seen = record_head(raw)
            token = str(ResumeToken(batch.epoch, seen.position + 1, EventId.parse(seen.id).tail))
            events.append(server_sent.event(bytes(raw), id=token))
        if token != batch.resume:  # what a filter skipped is done with as well
            events.append(server_sent.event(id=batch.resume))
        return b"".join(events)

    @staticmethod
    def _expired(notice: Expired) -> bytes:
        body = answers.expired_body(
            reason=notice.reason,
            requested=notice.requested,
            first=notice.first,
            head=notice.head,
            epoch=notice.epoch,
            resume=notice.resume,
        )
        return server_sent.event(body, id=notice.resume, name="cursor_expired")


async def _until_forbidden(identity: access.Identity, name: str, seen: Hashable) -> Reason:
    sure, undecided = time.monotonic(), 0
    while True:
        await access.until_recheck(identity, undecided=undecided)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(access.ANSWER_TIMEOUT):  # a rule may hang
                reason = await _verdict(identity, name, seen)
            if reason is not None:
                return reason
        except Exception as error:  # noqa: BLE001  (of a rule, too: no answer is not a no)
            if not isinstance(error, access.Undecided):
                access.complain("recheck_failed", error, f"stream={name}")
            undecided += 1
            if access.doubt_is_over(sure):
                return "failed", answers.UNAVAILABLE
        else:
            sure, undecided = begun, 0


async def _verdict(identity: access.Identity, name: str, seen: Hashable) -> Reason | None:
    """Return why a stream has to end; `None`: it may go on."""
    now = await identity.refreshed()
    if now is None or not await access.allowed(now, "stream.read", name):
        # A user who has just logged out may do nothing; that is the reason to name.
        if not await identity.still_valid():
            return "unauthenticated", "The login is over. Log in, or send a new token."
        return answers.denial(identity, name)
    if mask_key(await mask_of(now, name)) != seen:
        return "failed", "This user sees something else now. Connect again."
    return None


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(send: Send, refusal: Refused) -> None:
    headers = {"Content-Type": answers.JSON, "Cache-Control": "no-store", **refusal.headers}
    await send(_start(refusal.status, {**headers, "Content-Length": str(len(refusal.body))}))
    await send(_body(refusal.body))


def _start(status: int, headers: Mapping[str, str]) -> dict[str, Any]:
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": pairs}


def _body(body: bytes, *, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _first_of(*works: Coroutine[Any, Any, Any]) -> Any:
    """Run all until the first ends; cancel the others; return or raise what that one did."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = next(task for task in tasks if task.done())
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return ended.result()
