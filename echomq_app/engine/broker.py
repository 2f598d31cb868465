"""The way out: messages wait here for the channel layer, and nobody waits for them.

Handing a message over appends to a deque and, if the sender sleeps, rings its bell: no
lock, no I/O. One task on the engine's loop takes them from there and sends one at a
time, group after group in turn, each group's messages in order. While a send is under
way, what arrives for the same group may be merged into one message, so a burst costs
few round trips.

A broker that is down or hangs costs BROKER_TIMEOUT for the message under way and a
backoff; what has waited longer than BROKER_TIMEOUT by then is stale and lost with it.
Beyond PUBLISH_BACKLOG waiting messages, new ones are lost. Every loss is logged (at most
one line in ten seconds) and signalled, and none is raised.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from .. import signals
from ..conf import current
from ..core.retry import full_jitter
from .own_layer import OwnLayer

logger = logging.getLogger("echomq")

Merge = Callable[[dict[str, Any], dict[str, Any]], bool]
"""`merge(waiting, new)` takes `new` into `waiting` and returns True, or does nothing."""

BACKOFF_BASE = 0.05
BACKOFF_CAP = 1.0
CLOSING_TIMEOUT = 0.5
LOG_INTERVAL = 10.0


@dataclasses.dataclass(slots=True, kw_only=True)
class Outgoing:
    """A message on its way. `calls` counts the hand-overs that it stands for.

    `lost_after`: how many messages of its group were refused after it.
    """

    group: str
    message: dict[str, Any]
    key: str | None
    merge: Merge | None
    since: float
    calls: int = 1
    lost_after: int = 0


class Broker:
    """Sends messages to groups of the channel layer CHANNEL_LAYER, in the background."""

    sender_id: str
    """Names this process on the wire; another one after a fork."""
    link_is_good: bool
    """Whether the last send went through."""
    _asleep: bool
    _bell: asyncio.Event
    _idle: asyncio.Event

    def __init__(self, wake: Callable[[Callable[[], object]], bool]) -> None:
        """`wake(f)` runs `f` on the engine's loop, starting it if need be."""
        self._wake = wake
        self._start_afresh()

    def send(
        self,
        group: str,
        message: dict[str, Any],
        *,
        key: str | None = None,
        merge: Merge | None = None,
    ) -> bool:
        """Take a message for the group; False if it is lost already. Never blocks or raises.

        A message with a `key` is dropped while another of that group and key waits.
        """
        if self._closed:
            return False
        if len(self._inbox) + self._taken >= current().PUBLISH_BACKLOG:
            self._refuse(group)
            return False
        now = time.monotonic()
        self._inbox.append(Outgoing(group=group, message=message, key=key, merge=merge, since=now))
        # The sender first declares that it sleeps and then looks into the inbox again.
        if self._asleep:
            self._asleep = False
            if not self._wake(self._ring):
                self._asleep = True
                return False
        return True

    @property
    def pending(self) -> int:
        """How many messages wait, the one under way included."""
        return len(self._inbox) + self._taken

    async def run(self) -> None:
        """Send what comes, for ever. Runs on the engine's loop."""
        try:
            while True:
                try:
                    await self._send_next()
                except Exception:
                    logger.exception("event=sender_failed")
        finally:
            self._asleep = True  # The next send starts a loop again.
            await self._drop_layer()

    async def drained(self) -> None:
        """Return once nothing waits any more, sent or lost."""
        while self.pending:
            self._idle.clear()
            self._bell.set()
            await self._idle.wait()

    def attach(self) -> None:
        """Make what belongs to one loop. Runs on the engine's loop, before `run`."""
        self._bell = asyncio.Event()
        self._idle = asyncio.Event()
        self._asleep = False

    def forget(self) -> None:
        """Drop all that waits, without a word: it isn't ours, or was for other settings."""
        self._start_afresh()

    def close(self) -> None:
        """Take no more messages: the process ends, and what waits is lost."""
        self._closed = True
        if lost := self.pending:
            logger.info("event=publish_failed count=%d error=%s", lost, "the process ends")
        self._inbox.clear()

    def _start_afresh(self) -> None:
        self.sender_id = secrets.token_hex(8)
        self.link_is_good = False
        self.losses = Losses()
        self._closed = False
        self._inbox: deque[Outgoing] = deque()
        self._lanes: OrderedDict[str, deque[Outgoing]] = OrderedDict()
        self._waiting_keys: set[tuple[str, str]] = set()
        self._numbers: dict[str, int] = {}
        self._taken = 0
        self._failures = 0
        self._asleep = True
        self._own: OwnLayer | None = None
        self._refused: dict[str, int] = {}
        self._refused_lock = threading.RLock()  # a signal handler may publish too

    def _ring(self) -> None:
        self._bell.set()

    async def _send_next(self) -> None:
        self._drain()
        self._report_refused()
        if not self._lanes:
            self._idle.set()
            self._asleep = True
            if self._inbox:
                self._asleep = False
                return
            await self._bell.wait()
            self._bell.clear()
            return
        group, lane = self._lanes.popitem(last=False)
        entry = lane.popleft()
        if lane:
            self._lanes[group] = lane  # to the end: the groups take turns
        if entry.key is not None:
            self._waiting_keys.discard((group, entry.key))
        try:
            await self._deliver(entry)
        finally:
            self._taken -= entry.calls

    def _drain(self) -> None:
        for _ in range(len(self._inbox)):
            # Counted before it is taken away, so that `pending` never misses it.
            entry = self._inbox[0]
            self._taken += 1
            self._inbox.popleft()
            lane = self._lanes.get(entry.group)
            if entry.key is not None:
                if (entry.group, entry.key) in self._waiting_keys:
                    self._taken -= 1
                    continue
                self._waiting_keys.add((entry.group, entry.key))
            if lane is None:
                self._lanes[entry.group] = deque([entry])
            elif (
                entry.merge is not None
                and not lane[-1].lost_after
                and entry.merge(lane[-1].message, entry.message)
            ):
                lane[-1].calls += 1
            else:
                lane.append(entry)

    async def _deliver(self, entry: Outgoing) -> None:
        message = {**entry.message, "group": entry.group, "sender": self.sender_id}
        if entry.key is None:
            message["number"] = self._numbers.get(entry.group, 0)
            self._skip(entry.group, 1 + entry.lost_after)
        try:
            async with asyncio.timeout(current().BROKER_TIMEOUT):
                if self._own is None:
                    self._own = OwnLayer(current().CHANNEL_LAYER)
                await self._own.layer.group_send(entry.group, message)
        except (TypeError, ValueError, OverflowError) as error:
            # This message can't be sent; the link has no part in it.
            self.losses.add(entry.group, entry.calls, error)
        except Exception as error:  # noqa: BLE001  (a layer may raise anything)
            self.link_is_good = False
            self.losses.add(entry.group, entry.calls, error)
            self._failures += 1
            await self._drop_layer()
            self._expire(error)
            await asyncio.sleep(
                full_jitter(
                    self._failures, base=BACKOFF_BASE, cap=BACKOFF_CAP, random=random.random
                )
            )
        else:
            self.link_is_good = True
            self._failures = 0

    def _expire(self, error: Exception) -> None:
        """Lose what has waited too long for a broker that doesn't answer."""
        self._drain()
        oldest = time.monotonic() - current().BROKER_TIMEOUT
        for group, lane in list(self._lanes.items()):
            while lane and lane[0].since < oldest:
                entry = lane.popleft()
                self._taken -= entry.calls
                if entry.key is None:
                    self._skip(group, 1 + entry.lost_after)
                else:
                    self._waiting_keys.discard((group, entry.key))
                self.losses.add(group, entry.calls, error)
            if not lane:
                del self._lanes[group]

    async def _drop_layer(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            await own.close(CLOSING_TIMEOUT)

    def _refuse(self, group: str) -> None:
        with self._refused_lock:
            self._refused[group] = self._refused.get(group, 0) + 1

    def _report_refused(self) -> None:
        if not self._refused:
            return
        with self._refused_lock:
            refused, self._refused = self._refused, {}
        for group, count in refused.items():
            if lane := self._lanes.get(group):
                lane[-1].lost_after += count
            else:
                self._skip(group, count)
            self.losses.add(group, count, "PUBLISH_BACKLOG is full")

    def _skip(self, group: str, count: int) -> None:
        """Go on with a later number; readers see those that nobody sends as a hole."""
        self._numbers[group] = self._numbers.get(group, 0) + count


class Losses:
    """Says what was lost: a signal each time, a log line now and then."""

    def __init__(self) -> None:
        self._unlogged = 0
        self._next_line = float("-inf")

    def add(self, group: str, count: int, error: Exception | str) -> None:
        """Report `count` messages of `group` as lost because of `error`."""
        self._unlogged += count
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + LOG_INTERVAL
            logger.warning(
                "event=publish_failed group=%s count=%d error=%s", group, self._unlogged, error
            )
            self._unlogged = 0
        signals.publish_failed.send_robust(sender=Broker, group=group, count=count, error=error)
