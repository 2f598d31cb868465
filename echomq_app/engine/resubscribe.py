"""The resubscribe set: one link to the broker that hears every group wanted here.

A link is a fresh layer instance, one channel on it, that channel's membership in all
groups that the switchboard wants, and one receive task that is never timed out by
cancelling it (pub/sub would unsubscribe). When the link breaks, everything is made anew
and every group is joined again; a broker that forgot all of them makes no difference.
Then all who listen are told that there is a gap, before any message of the new link.

How a break is noticed: the receive raises; or redis-py had to connect again (see
`own_layer.py`), which the layer itself keeps quiet about; or a probe, sent to a group of
our own every RESUBSCRIBE_INTERVAL, doesn't come back (a half-open connection, a broker
that lost its memory but not its connections). An idle link is none of these. With every
probe all groups are joined again, which also keeps them from expiring.

Messages carry their sender's number, so what a broker dropped in silence shows as a
hole, and a repeat is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from ..conf import current
from ..core.numbering import SenderNumbers
from ..core.retry import full_jitter
from .own_layer import OwnLayer, is_idle_timeout
from .switchboard import Message, Switchboard

logger = logging.getLogger("echomq")

PROBE = "echomq.probe"
WAKE = "echomq.wake"
MISSED = "echo.cursor_expired"
"""What an EchoChannelLayer sends where messages are missing."""
BACKOFF_BASE = 0.02
BACKOFF_CAP = 0.5
CLOSING_TIMEOUT = 0.5
LEAVING_TIMEOUT = 0.3
STABLE = 1.0
"""A link that lived this long is followed by the next one without a pause."""
HOLD_LIMIT = 10_000
LEAVE_LIMIT = 1000
SHORTEST_IDLE = 0.05


class LinkLost(Exception):
    """The link to the broker has to be made anew."""


class GroupListener:
    """Delivers to the switchboard what the broker sends to its groups.

    Made and used on the engine's loop only.
    """

    def __init__(
        self, switchboard: Switchboard, sender_id: str, has_broker: Callable[[], bool]
    ) -> None:
        self._switchboard = switchboard
        self._sender_id = sender_id
        self._has_broker = has_broker
        self._bell = asyncio.Event()
        self._synced = asyncio.Condition()
        # Whose messages we take: a group is here from before it is joined until it is left.
        self._numbers: dict[str, SenderNumbers] = {}
        self._joined: set[str] = set()
        self._confirmed: set[str] = set()  # joined, and a probe has come back since
        self._held: list[Message] | None = None
        self.link_is_good = False
        """Whether the link is up, as far as the last probe tells."""
        self._owes_gap = False
        self._to_leave: list[tuple[str, str]] = []  # (group, channel) of links that broke
        self._probe_group = f"emq.p.{secrets.token_hex(8)}"
        self._probes = itertools.count()
        self._answered = -1

    def changed(self) -> None:
        """Look at what the switchboard wants, soon."""
        self._bell.set()

    async def joined(self, groups: set[str]) -> None:
        """Return once the link is up and hears these groups."""
        self._bell.set()
        async with self._synced:
            await self._synced.wait_for(lambda: groups <= self._confirmed)

    async def run(self) -> None:
        """Keep a link up as long as somebody wants a group, for ever."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                while not (self._switchboard.groups() and self._has_broker()):
                    self._bell.clear()
                    await self._bell.wait()
                began = time.monotonic()
                await self._keep_link()
            except Exception as error:  # noqa: BLE001  (a layer may raise anything)
                self._owes_gap = True
                failures = 1 if time.monotonic() - began >= STABLE else failures + 1
                await self._back_off(failures, error)

    async def _back_off(self, failures: int, error: Exception) -> None:
        if failures & (failures - 1) == 0:  # 1, 2, 4, 8…: a long outage is no flood
            level = logging.INFO if failures == 1 else logging.WARNING
            logger.log(level, "event=link_lost failures=%d error=%s", failures, _said(error))
        if failures > 1:
            await asyncio.sleep(
                full_jitter(failures - 1, base=BACKOFF_BASE, cap=BACKOFF_CAP, random=random.random)
            )

    async def _keep_link(self) -> None:
        """Make a link and return when nobody wants it any more, or raise."""
        self._joined, self._confirmed, self._held = set(), set(), []
        own = OwnLayer(current().CHANNEL_LAYER, on_reconnect=self._bell.set)
        channel = ""
        try:
            channel = await _answer(own.layer.new_channel())
            own.receiver = asyncio.create_task(self._receive(own, channel))
            own.receiver.add_done_callback(self._receive_ended)
            await _answer(own.layer.group_add(self._probe_group, channel))
            await self._sync(own, channel)
            await self._probe(own)
            await self._open()
            await self._leave_old(own)
            await self._watch(own, channel)
        finally:
            self._confirmed, self.link_is_good = set(), False
            self._to_leave += [(group, channel) for group in self._joined | {self._probe_group}]
            if not own.broken:
                await self._leave_old(own)
            await own.close(CLOSING_TIMEOUT)

    async def _watch(self, own: OwnLayer, channel: str) -> None:
        loop = asyncio.get_running_loop()
        tick = loop.time() + current().RESUBSCRIBE_INTERVAL
        while True:
            try:
                async with asyncio.timeout_at(tick):
                    await self._bell.wait()
            except TimeoutError:
                tick = loop.time() + current().RESUBSCRIBE_INTERVAL
                if not self._switchboard.groups():
                    return
                await self._probe(own)
                await _answer(own.layer.group_add(self._probe_group, channel))
                for group in list(self._joined):
                    await _answer(own.layer.group_add(group, channel))
            self._bell.clear()
            self._check(own)
            if await self._sync(own, channel):
                await self._probe(own)
                await self._confirm()

    async def _sync(self, own: OwnLayer, channel: str) -> bool:
        """Join what is wanted, leave what is not; tell whether anything was joined."""
        wanted = self._switchboard.groups()
        for group in self._joined - wanted:
            self._joined.discard(group)
            self._confirmed.discard(group)
            self._numbers.pop(group, None)
            await _answer(own.layer.group_discard(group, channel))
        missing = wanted - self._joined
        for group in missing:
            self._numbers[group] = SenderNumbers()
            await _answer(own.layer.group_add(group, channel))
            self._joined.add(group)
        return bool(missing)

    async def _probe(self, own: OwnLayer) -> None:
        """Send a message round to ourselves: the link hears, and so far it forgot nothing."""
        number = next(self._probes)
        own.prober = asyncio.current_task()
        try:
            message = {"type": PROBE, "group": self._probe_group, "number": number}
            await _answer(own.layer.group_send(self._probe_group, message))
        finally:
            own.prober = None
        try:
            async with asyncio.timeout(current().BROKER_TIMEOUT):
                while self._answered < number:
                    self._check(own)
                    await self._bell.wait()
                    self._bell.clear()
        except TimeoutError:
            own.broken = "a probe did not come back"
        self._bell.set()  # It may have rung for something else too.
        self._check(own)

    def _check(self, own: OwnLayer) -> None:
        receiver = own.receiver
        if receiver is not None and receiver.done() and not own.broken:
            own.broken = "cancelled" if receiver.cancelled() else _said(receiver.exception())
        if own.broken:
            raise LinkLost(own.broken)

    async def _open(self) -> None:
        """The link hears everything: tell of the gap, then let the messages through."""
        self._numbers = {group: SenderNumbers() for group in self._joined}
        if self._owes_gap:
            self._owes_gap = False
            logger.info("event=link_restored groups=%d", len(self._joined))
            self._switchboard.gap("reconnect")
        held, self._held = self._held or [], None
        for message in held:
            self._deliver(message)
        self.link_is_good = True
        await self._confirm()

    async def _confirm(self) -> None:
        new, self._confirmed = self._joined - self._confirmed, set(self._joined)
        for group in new:
            # A wake-up may have come just before we joined.
            self._switchboard.deliver(group, {"type": WAKE, "group": group, "joined": True})
        async with self._synced:
            self._synced.notify_all()

    async def _leave_old(self, own: OwnLayer) -> None:
        """Take channels of former links out of their groups, where a broker keeps them."""
        if own.leaves_by_closing:
            self._to_leave.clear()
        del self._to_leave[:-LEAVE_LIMIT]
        try:
            async with asyncio.timeout(LEAVING_TIMEOUT):
                while self._to_leave:
                    group, channel = self._to_leave[-1]
                    await own.layer.group_discard(group, channel)
                    self._to_leave.pop()
        except Exception as error:  # noqa: BLE001  (the next link tries again)
            logger.debug("event=leave_failed error=%r", error)

    async def _receive(self, own: OwnLayer, channel: str) -> None:
        while True:
            began = time.monotonic()
            try:
                message = await own.layer.receive(channel)
            except Exception as error:
                if not is_idle_timeout(error):
                    raise
                own.link_is_new()
                if time.monotonic() - began < SHORTEST_IDLE:
                    await asyncio.sleep(SHORTEST_IDLE)
                continue
            if not own.broken:  # After a break the gap comes first, from a new link.
                self._take(message)

    def _receive_ended(self, task: asyncio.Task[None]) -> None:
        # Looked at here, so that asyncio doesn't complain when a stop comes in between.
        if not task.cancelled():
            task.exception()
        self._bell.set()

    def _take(self, message: Any) -> None:
        try:
            if message.get("type") == PROBE:
                if message.get("group") == self._probe_group:
                    self._answered = message["number"]
                    self._bell.set()
            elif message.get("type") == MISSED:
                self._switchboard.gap("lost")
            elif self._held is None:
                self._deliver(message)
            elif len(self._held) < HOLD_LIMIT:
                self._held.append(message)
            else:
                self._owes_gap = True
        except Exception:
            logger.exception("event=bad_message message=%.200r", message)

    def _deliver(self, message: Message) -> None:
        group = message.get("group")
        numbers = self._numbers.get(group) if isinstance(group, str) else None
        if group is None or numbers is None:
            return  # We have left the group, or somebody sends us what isn't ours.
        sender, number = message.get("sender"), message.get("number")
        if number is None:
            if sender == self._sender_id:
                return  # A wake-up of this process, which was delivered directly.
        else:
            missing = numbers.take(sender, number)
            if missing is None:
                return
            if missing:
                self._switchboard.gap("lost", group)
        self._switchboard.deliver(group, message)


async def _answer(awaitable: Awaitable[Any]) -> Any:
    timeout = current().BROKER_TIMEOUT
    try:
        async with asyncio.timeout(timeout):
            return await awaitable
    except TimeoutError:
        raise LinkLost(f"no answer in {timeout:g} s; is the address right, the password?") from None


def _said(error: BaseException | None) -> str:
    return str(error) if isinstance(error, LinkLost) else f"{type(error).__name__}: {error}"
