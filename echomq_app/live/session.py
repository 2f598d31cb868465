"""One socket: who it is, and what it is subscribed to.

Frames are handled as they come, without waiting: what takes time (to find out who it is,
to open a subscription) runs in tasks of its own. Only the writer sends (writer.py), so a socket
that takes nothing blocks nobody's `unsubscribe`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Hashable
from functools import partial
from typing import Any, Protocol

from django.db import Error as DatabaseError

from ..core import frames
from ..core.frames import BadFrame, Close, ServerFrame
from ..exceptions import BadToken, InvalidName, InvalidPayload, UnknownStream
from . import access
from .access import NOBODY, Identity
from .hub import Mask
from .items import mask_key
from .limits import Limits, Rate
from .subscribed import Pending, Subscription, asked_for, subscription_of
from .writer import Sink, Source, Writer

logger = logging.getLogger("echomq.live")

LOOK_EVERY = 15.0
"""Seconds between two looks at windows that stay full, and at sends that don't end."""


class Socket(Sink, Protocol):
    """What a session needs of its socket, and what projects may decide."""

    limits: Limits

    async def who(self) -> Identity: ...
    async def may(self, identity: Identity, action: str, target: str) -> bool: ...
    async def mask_for(self, identity: Identity, stream: str) -> Mask | None: ...


class Session:
    """The server's side of the protocol, for one socket."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self._limits = socket.limits
        self._rate = Rate(self._limits.frames_per_second, self._limits.frames_at_once)
        self._mistakes = 0
        self._subscriptions: dict[int, Subscription] = {}
        self._opening: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._writer = Writer(socket, self._sources, self._run)
        self._identity: asyncio.Task[Identity] | None = None
        self._guard: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin: find out who it is, and write."""
        self._become(self._socket.who())
        self._writer.start()
        self._run(self._expect_login())
        self._run(self._expect_acks())

    async def stop(self) -> None:
        """End everything; the socket is gone."""
        self._writer.is_gone()
        tasks: set[asyncio.Task[Any]] = {*self._tasks, *self._opening.values()}
        tasks |= {task for task in (self._identity, self._guard) if task is not None}
        for task in tasks:
            task.cancel()
        for subscription in self._subscriptions.values():
            subscription.close()
        self._subscriptions.clear()
        await asyncio.gather(*tasks, return_exceptions=True)

    # What comes

    def handle(self, message: str | bytes) -> None:
        """Take a message of the client's."""
        if self._writer.closing is not None:
            return
        if len(message) > self._limits.frame_bytes:
            limit = f"A message has at most {self._limits.frame_bytes:,} bytes."
            self._end(Close.TOO_LARGE, "bad_frame", limit)
            return
        try:
            came = frames.decode(message)
        except BadFrame as error:
            self._mistake("bad_frame", str(error))
            return
        if not came:
            self._mistake("bad_frame", "That is an empty array.")
        for frame in came:
            # As many acknowledgements may come as there is something to acknowledge.
            free = isinstance(frame, frames.Ack) and self._ack(frame)
            if not free and not self._rate.spend():
                limit = f"At most {self._limits.frames_per_second:g} frames a second."
                self._end(Close.TOO_FAST, "rate", limit)
                return
            self._obey(frame)

    def _obey(self, frame: frames.ClientFrame) -> None:
        match frame:
            case frames.Ping():
                self._writer.tell(frames.Pong())
            case frames.Subscribe():
                self._subscribe(frame)
            case frames.Unsubscribe(sub):
                if self._drop(sub):
                    self._writer.tell(frames.Unsubscribed(sub=sub))
                else:  # no mistake: it may have ended while this was on its way
                    gone = f"There is no subscription {sub}."
                    self._writer.tell(frames.Error(code="unknown_sub", message=gone))
            case frames.Auth(token):
                self._become(access.identify_token(token))

    def _ack(self, frame: frames.Ack) -> bool:
        """Make room; tell whether there was something to acknowledge."""
        subscription = self._subscriptions.get(frame.sub)
        if subscription is None:
            return False  # it ended while the acknowledgement was on its way
        self._writer.wake()
        return subscription.acked(frame.cursor)

    def _subscribe(self, frame: frames.Subscribe) -> None:
        sub = frame.sub
        if sub in self._subscriptions:
            self._mistake("sub_in_use", f"Subscription {sub} is there; choose another number.")
        elif len(self._subscriptions) >= self._limits.subscriptions:
            limit = f"A socket has at most {self._limits.subscriptions} subscriptions."
            self._writer.tell(frames.Error(code="too_many", message=limit, sub=sub))
        else:
            self._subscriptions[sub] = Pending()
            task = self._opening[sub] = asyncio.create_task(self._open(frame))
            task.add_done_callback(partial(self._opened, sub))

    async def _open(self, frame: frames.Subscribe) -> None:
        sub = frame.sub
        try:
            action, target = asked_for(frame)
            while True:
                identity, who = await self._who(), self._identity
                now = await identity.refreshed()
                may, mask = now is not None and await self._socket.may(now, action, target), None
                if now is not None and may and frame.stream is not None:
                    mask = await self._socket.mask_for(now, frame.stream)
                if who is self._identity:
                    break  # else it has become another user's meanwhile
            if not may:
                if await self._is_over(identity):
                    self._log_out()
                else:
                    self._refuse(sub, action, target, identity)
                return
            subscription = subscription_of(frame, mask, self._writer.wake)
            self._subscriptions[sub] = subscription
            subscribed = await subscription.open()
            if self._waits_for_too_many():
                limit = f"This socket waits for {self._limits.missing_streams} missing streams."
                self._lose(sub, "too_many", f"{limit} Unsubscribe from one of them first.")
            else:
                self._writer.tell(subscribed)
        except InvalidName as error:
            self._lose(sub, "bad_name", str(error))
        except InvalidPayload as error:
            self._lose(sub, "bad_frame", str(error))
        except Exception as error:  # noqa: BLE001  (one subscription fails, the socket goes on)
            self._fail(sub, error)

    def _waits_for_too_many(self) -> bool:
        missing = sum(each.waits_for_stream for each in self._subscriptions.values())
        return missing > self._limits.missing_streams

    def _opened(self, sub: int, task: asyncio.Task[None]) -> None:
        if self._opening.get(sub) is task:  # the number may be another's by now
            del self._opening[sub]

    def _become(self, who: Coroutine[Any, Any, Identity]) -> None:
        before = self._identity

        async def become() -> Identity:
            try:
                identity = await who
            except BadToken as error:
                self._mistake("bad_token", str(error))
                identity = NOBODY if before is None else await before
            self._writer.tell(frames.Welcome(user=identity.authenticated))
            return identity

        self._identity = task = asyncio.create_task(become())
        if self._guard is not None:
            self._guard.cancel()
        self._guard = asyncio.create_task(self._watch_over(task, at_once=before is not None))
        self._guard.add_done_callback(self._ended)

    async def _who(self) -> Identity:
        """Return whose the socket is, once that is known."""
        while True:
            task = self._identity
            if task is None:
                return NOBODY
            identity = await asyncio.shield(task)
            if task is self._identity:
                return identity

    # Whether it may go on

    async def _watch_over(self, who: asyncio.Task[Identity], *, at_once: bool) -> None:
        """Ask again, from time to time and on logout, whether it may what it does."""
        identity = await asyncio.shield(who)
        undecided = 0
        while True:
            if not at_once:
                await access.until_recheck(identity, undecided=undecided)
            at_once = False
            undecided = 0 if await self._ask_about_all(identity) else undecided + 1

    async def _ask_about_all(self, identity: Identity) -> bool:
        """Ask about each subscription; tell whether every question got an answer."""
        now, decided = None, True
        try:
            async with asyncio.timeout(access.ANSWER_TIMEOUT):
                now = await identity.refreshed()
        except Exception as error:  # noqa: BLE001  (asked again)
            access.complain("recheck_failed", error)
            decided = False
        if decided and now is None:
            self._log_out()
            return True
        there = [each for each in self._subscriptions.items() if not isinstance(each[1], Pending)]
        # At once, not in turn: a rule that hangs is about one of them.
        answers = await asyncio.gather(*(self._is_decided(now, *each) for each in there))
        return decided and all(answers)

    async def _is_decided(self, now: Identity | None, sub: int, subscription: Subscription) -> bool:
        """Ask about one subscription; tell whether there was an answer."""
        try:
            if now is not None:
                async with asyncio.timeout(access.ANSWER_TIMEOUT):
                    await self._ask_again(now, sub, subscription)
                return True
        except access.Undecided:
            pass
        except Exception as error:  # noqa: BLE001  (a rule's; the others are asked all the same)
            access.complain("recheck_failed", error, f"target={subscription.target}")
        there = self._subscriptions.get(sub) is subscription
        if there and access.doubt_is_over(subscription.confirmed_at):
            self._lose(sub, "failed", access.UNDECIDED)
        return False

    async def _ask_again(self, now: Identity, sub: int, subscription: Subscription) -> None:
        begun = time.monotonic()
        may = await self._socket.may(now, subscription.action, subscription.target)
        same = may and subscription.mask_key == await self._mask_key(now, subscription)
        over = not may and await self._is_over(now)
        if self._subscriptions.get(sub) is not subscription:
            return  # it ended meanwhile, and the number may be another's
        if over:
            self._log_out()
        elif not may:
            self._refuse(sub, subscription.action, subscription.target, now)
        elif not same:
            self._lose(sub, "failed", "This user sees something else now; subscribe again.")
        else:
            subscription.confirmed_at = begun

    @staticmethod
    async def _is_over(identity: Identity) -> bool:
        """Tell whether that is why it may not: whose session is over may do nothing."""
        return identity.authenticated and await identity.reload() is None

    def _log_out(self) -> None:
        over = "The session or the token is over: log in, or get a new token."
        self._end(Close.UNAUTHENTICATED, "unauthenticated", over)

    async def _mask_key(self, identity: Identity, subscription: Subscription) -> Hashable:
        if subscription.action != "stream.read":
            return None
        return mask_key(await self._socket.mask_for(identity, subscription.target))

    async def _expect_login(self) -> None:
        """End the socket unless it is somebody's, or reads what is for everybody."""
        while True:
            await asyncio.sleep(self._limits.login_timeout)
            if (await self._who()).authenticated:
                return
            asked = list(self._subscriptions.values())
            if any(not isinstance(subscription, Pending) for subscription in asked):
                return
            if not asked:  # else look again: to ask is not to read
                late = (
                    "Nobody logged in: send a token, or open the socket from a page of a session."
                )
                self._end(Close.UNAUTHENTICATED, "unauthenticated", late)
                return

    def _refuse(self, sub: int, action: str, target: str, identity: Identity) -> None:
        if identity.authenticated:
            what = f"{action} of {target!r}"
            self._lose(sub, "denied", f"This user may not do that: {what}.")
        else:
            need = (
                "This socket is nobody's: log in, or send a token. (The session's cookie counts "
                "on pages of our own site only.)"
            )
            self._lose(sub, "unauthenticated", need)

    # What goes

    def _sources(self) -> list[Source]:
        """One for each subscription."""
        return [partial(self._next, *each) for each in self._subscriptions.items()]

    def _next(self, sub: int, subscription: Subscription) -> ServerFrame | None:
        if self._subscriptions.get(sub) is not subscription:
            return None
        try:
            return subscription.next()
        except Exception as error:  # noqa: BLE001
            self._fail(sub, error)
            return None

    async def _expect_acks(self) -> None:
        """End the socket of a client that is there no more, or acts as if it weren't."""
        patience = self._limits.ack_timeout
        while self._writer.closing is None:
            await asyncio.sleep(LOOK_EVERY)
            since = [subscription.full_since for subscription in self._subscriptions.values()]
            latest = time.monotonic() - patience
            if any(at is not None and at < latest for at in (*since, self._writer.sending_since)):
                silent = f"Nothing was acknowledged for {patience:g} s."
                self._end(Close.NOT_ACKNOWLEDGED, "failed", silent)

    # How things end

    def _drop(self, sub: int) -> bool:
        subscription = self._subscriptions.pop(sub, None)
        task = self._opening.pop(sub, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        if subscription is not None:
            subscription.close()
        return subscription is not None

    def _lose(self, sub: int, code: str, message: str) -> None:
        """End a subscription with an error."""
        self._drop(sub)
        self._writer.tell(frames.Error(code=code, message=message, sub=sub))

    def _fail(self, sub: int, error: Exception) -> None:
        if isinstance(error, UnknownStream):
            self._lose(sub, "unknown_stream", "The stream was deleted.")
        elif isinstance(error, access.Undecided | DatabaseError):
            if isinstance(error, DatabaseError):
                access.complain("subscription_failed", error)
            self._lose(sub, "failed", access.UNDECIDED)
        else:
            logger.error("event=subscription_failed sub=%d", sub, exc_info=error)
            self._lose(sub, "failed", "The server failed; subscribe again with the last token.")

    def _mistake(self, code: str, message: str) -> None:
        """Refuse something; too many of them end the socket."""
        self._writer.tell(frames.Error(code=code, message=message))
        self._mistakes += 1
        if self._mistakes >= self._limits.mistakes:
            self._writer.close(Close.BAD_FRAMES)

    def _end(self, code: int, error: str, message: str) -> None:
        if self._writer.closing is None:
            self._writer.tell(frames.Error(code=error, message=message))
            self._writer.close(code)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            access.complain("socket_failed", error)
            self._end(Close.FAILED, "failed", "The server failed; connect again.")
