"""Channels and groups of this process: safe from any thread, on any number of loops.

A channel is a bounded queue of encoded messages; the bytes are shared by all channels
that hold them. A message that finds its channel full is dropped, and so is every later
one until the channel has been read empty; then its reader gets one notice of how many
it has missed, and after that what comes next. The same notice tells of what was missed
on the way here.

Nobody says when a channel isn't needed any more: a consumer at best leaves its groups. Its
channel is removed a minute after its name, the object that `new_channel` returned, has been
collected with it; never while somebody waits in it, and not if it was used by a copy of the
name.

A reader waits on a future of its own loop. The future says only "look again": cancelling
`receive` at any moment loses no message and changes no order. A delivery wakes each loop
once, however many channels it fills.
"""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
from channels.exceptions import ChannelFull

from ..core.echo.frames import Record
from .box import Box, ChannelName, Missed, Waiter

ORPHANED = 60.0
"""Seconds after which a channel is removed whose name nobody has any more."""

_decode = msgspec.msgpack.Decoder().decode


class LocalChannels:
    """All channels of one node in this process. `lock` guards them; it may be held already."""

    def __init__(self, node: str, capacity: int, lock: threading.RLock) -> None:
        self._node = node
        self._capacity = capacity
        self._lock = lock
        self._boxes: dict[str, Box] = {}
        self._orphans: deque[Box] = deque()
        self._groups: dict[str, dict[str, Box]] = {}

    def open(self, name: str, owner: object = None) -> Box:
        """Return the channel, made if it isn't there."""
        with self._lock:
            box = self._boxes.get(name)
            if box is None:
                self._remove_orphans()
                box = Box(name, owner)
                self._boxes[box.name] = box
                if isinstance(name, ChannelName):
                    orphans = self._orphans
                    box.named = weakref.ref(name, lambda gone: _orphan(box, orphans))
            elif box.named is not None and box.named() is not name:
                box.named = box.orphaned_at = None  # known by a copy, so it says nothing
            return box

    def join(self, group: str, name: str) -> None:
        """Let the channel hear the group from now on."""
        with self._lock:
            box = self.open(name)
            box.groups.add(group)
            self._groups.setdefault(group, {})[box.name] = box

    def leave(self, group: str, name: str) -> None:
        """Let the channel hear the group no more."""
        with self._lock:
            members = self._groups.get(group)
            box = members.pop(name, None) if members is not None else None
            if box is not None:
                box.groups.discard(group)
            if not members:
                self._groups.pop(group, None)

    def members(self, group: str) -> int:
        """Return how many channels hear the group."""
        return len(self._groups.get(group, ()))

    def close(self, name: str) -> None:
        """Remove the channel, with what waits in it."""
        with self._lock:
            box = self._boxes.pop(name, None)
            if box is not None:
                box.named = None
                for group in list(box.groups):
                    self.leave(group, name)

    def close_all_of(self, owner: object) -> None:
        """Remove the channels that were made through `owner`."""
        with self._lock:
            for box in list(self._boxes.values()):
                if box.owner is not None and box.owner() is owner:
                    self.close(box.name)

    def clear(self) -> None:
        """Forget all messages and all memberships."""
        with self._lock:
            self._groups.clear()
            for box in self._boxes.values():
                box.items.clear()
                box.notices = []
                box.groups.clear()
                box.dropped = 0

    def deliver(self, records: Iterable[Record]) -> None:
        """Hand each record to the channels in its group, in order."""
        touched: dict[str, Box] = {}
        seen = set()
        with self._lock:
            groups, capacity = self._groups, self._capacity
            for group, payload in records:
                members = groups.get(group)
                if members is None:
                    continue
                for box in members.values():
                    if box.dropped or box.notices or len(box.items) >= capacity:
                        self._put(box, payload)
                    else:
                        box.items.append(payload)
                if group not in seen:
                    seen.add(group)
                    touched.update(members)
            self._wake(touched.values())

    def put(self, name: str, payload: bytes) -> None:
        """Hand a message to one channel; raise `ChannelFull`. Nobody's channel: dropped."""
        with self._lock:
            box = self._boxes.get(name)
            if box is None:
                return
            if box.dropped or len(box.items) >= self._capacity:
                raise ChannelFull(name)
            self._put(box, payload)
            self._wake([box])

    def notify(self, node: str, missed: int) -> int:
        """Tell every channel that is in some group that it missed messages of a node.

        Returns how many channels that are.
        """
        with self._lock:
            members = [box for box in self._boxes.values() if box.groups]
            for box in members:
                if box.dropped:
                    continue  # Its reader will be told anyway, of a hole before this one.
                for notice in box.notices:
                    if notice.node == node:
                        notice.count += missed
                        break
                else:
                    notice = Missed(node, missed)
                    box.notices.append(notice)
                    box.items.append(notice)
            self._wake(members)
            return len(members)

    async def receive(self, name: str) -> dict[str, Any]:
        """Return the channel's next message, or wait for it."""
        loop = asyncio.get_running_loop()
        while True:
            with self._lock:
                box = self.open(name)
                box.loop = loop
                found = self._take(box)
                if found is None:
                    waiter = loop.create_future()
                    box.waiters.append((loop, waiter))
            if found is not None:
                return found.message() if isinstance(found, Missed) else _decode(found)
            try:
                await waiter
            except asyncio.CancelledError:
                self._stop_waiting(box, (loop, waiter))
                raise

    def _take(self, box: Box) -> bytes | Missed | None:
        if box.items:
            item = box.items.popleft()
            if box.notices and isinstance(item, Missed):
                box.notices = [notice for notice in box.notices if notice is not item]
            return item
        if box.dropped:
            missed, box.dropped = box.dropped, 0
            return Missed(self._node, missed)
        return None

    def _put(self, box: Box, payload: bytes) -> None:
        if box.dropped:
            box.dropped += 1
        elif len(box.items) < self._capacity:
            if box.notices:
                box.notices = []
            box.items.append(payload)
        else:
            box.dropped = 1

    def _remove_orphans(self) -> None:
        before = time.monotonic() - ORPHANED
        while self._orphans and (self._orphans[0].orphaned_at or 0.0) <= before:
            box = self._orphans.popleft()
            if box.orphaned_at is not None and not box.waiters:
                self.close(box.name)

    def _stop_waiting(self, box: Box, waiter: Waiter) -> None:
        with self._lock:
            if waiter in box.waiters:
                box.waiters.remove(waiter)
            else:  # It was woken, for a message that somebody else may take now.
                self._wake([box])

    def _wake(self, boxes: Iterable[Box]) -> None:
        if self._orphans:
            self._remove_orphans()
        due: dict[asyncio.AbstractEventLoop, list[tuple[Box, asyncio.Future[None]]]] = {}
        for box in boxes:
            waiters = box.waiters
            if waiters:
                for _ in range(min(len(waiters), len(box.items) + bool(box.dropped))):
                    loop, future = waiters.popleft()
                    due.setdefault(loop, []).append((box, future))
            elif box.dropped and box.loop is not None and box.loop.is_closed():
                self.close(box.name)
        for loop, sleepers in due.items():
            futures = [future for _, future in sleepers]
            if asyncio._get_running_loop() is loop:
                _settle(futures)
                continue
            try:
                loop.call_soon_threadsafe(_settle, futures)
            except RuntimeError:  # The loop is closed: nobody reads these channels any more.
                for box, _ in sleepers:
                    self.close(box.name)


def _orphan(box: Box, orphans: deque[Box]) -> None:
    # Called by the collector, in the middle of anything: no lock.
    box.orphaned_at = time.monotonic()
    orphans.append(box)


def _settle(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
