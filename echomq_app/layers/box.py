"""One channel of this process: what waits in it, and who waits for it."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from typing import Any

CURSOR_EXPIRED = "echo.cursor_expired"

Waiter = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class ChannelName(str):
    """A channel's name that can be watched: when it is gone, so is its consumer."""


class Missed:
    """A notice in a channel's queue. Later ones of the same node may be added to it."""

    __slots__ = ("count", "node")

    def __init__(self, node: str, count: int) -> None:
        self.node = node
        self.count = count

    def message(self) -> dict[str, Any]:
        return {"type": CURSOR_EXPIRED, "node": self.node, "missed": self.count}


class Box:
    """One channel."""

    __slots__ = (
        "dropped",
        "groups",
        "items",
        "loop",
        "name",
        "named",
        "notices",
        "orphaned_at",
        "owner",
        "waiters",
    )

    def __init__(self, name: str, owner: object = None) -> None:
        self.name = str(name)  # a copy, which keeps no ChannelName alive
        self.named: weakref.ref[str] | None = None
        self.orphaned_at: float | None = None
        self.items: deque[bytes | Missed] = deque()
        self.notices: list[Missed] = []
        """Those at the end of the queue, after the last message."""
        self.dropped = 0
        self.waiters: deque[Waiter] = deque()
        self.groups: set[str] = set()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.owner = None if owner is None else weakref.ref(owner)
