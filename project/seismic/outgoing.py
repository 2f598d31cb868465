"""Frames on their way to one page: bounded, with one writer behind them.

The log waits for room, because it can: its records stay in the database. The feed
doesn't, because nothing may hold it up: what finds no room is lost, and said so.
"""

from __future__ import annotations

import asyncio
from typing import Any

Frame = dict[str, Any]

ROOM = 1_000
AT_ONCE = 100


class Outgoing:
    """A queue for one event loop."""

    def __init__(self, room: int = ROOM) -> None:
        self._frames: asyncio.Queue[Frame] = asyncio.Queue(room)
        self._lost = 0
        self.close_code: int | None = None
        """Set by `end`: close with this once everything before has been taken."""

    async def put(self, frame: Frame) -> None:
        """Add a frame, when there is room."""
        await self._frames.put(frame)

    def offer(self, frame: Frame) -> None:
        """Add a frame if there is room; else it is lost, and a gap is reported instead."""
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self._lost += 1

    def end(self, close_code: int) -> None:
        """Let the writer finish; the first code stays."""
        if self.close_code is None:
            self.close_code = close_code
            self.offer({"kind": "bye", "code": close_code})  # Wakes the writer.

    async def take(self, timeout: float) -> list[Frame]:
        """Return the next frames in order, or none after `timeout` seconds."""
        try:
            frames = [await asyncio.wait_for(self._frames.get(), timeout)]
        except TimeoutError:
            return []
        while len(frames) < AT_ONCE and not self._frames.empty():
            frames.append(self._frames.get_nowait())
        if self._lost and self._frames.empty():
            # After the events that had room: the page counts by position, not by order.
            frames.append(
                {"kind": "gap", "why": f"this page was too slow for {self._lost} event(s)"}
            )
            self._lost = 0
        return frames

    @property
    def finished(self) -> bool:
        """Whether everything has been taken, and the end was asked for."""
        return self.close_code is not None and self._frames.empty()
