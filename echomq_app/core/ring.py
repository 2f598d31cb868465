"""The ring buffer of recent items, and the flush decision: caught up, gap, or expired.

Cursors are absolute and only ever grow (Python's integers don't overflow); the buffer is
bounded and wraps. A cursor is the position of the next item that a reader still needs, so
subtracting it from the write cursor tells how far behind the reader is, and comparing it
with `first` tells whether what it needs still exists. Nothing else has to be kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class CaughtUp:
    """The reader has everything: send nothing, not even an empty batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """The reader needs the positions `start` to `stop - 1`, and all of them are held."""

    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True)
class Expired:
    """Of what the reader needs, the oldest `missed` items are gone for good."""

    missed: int


Decision = CaughtUp | Gap | Expired

_CAUGHT_UP = CaughtUp()


def decide(cursor: int, *, first: int, write_cursor: int) -> Decision:
    """Say what a reader at `cursor` needs, when `first` to `write_cursor - 1` are held.

    `ValueError` for a cursor beyond the write cursor: it belongs to something else.
    """
    if cursor > write_cursor:
        raise ValueError(f"Cursor {cursor} is beyond the write cursor {write_cursor}.")
    if cursor == write_cursor:
        return _CAUGHT_UP
    if cursor < first:
        return Expired(first - cursor)
    return Gap(cursor, write_cursor)


class RingBuffer(Generic[T]):
    """The last `size` items written, each at its position: slot = (position - start) mod size.

    Holds no lock: its owner has one, and holds it around every call. Slots are made as
    they are first used, so a large ring that holds little costs little.
    """

    __slots__ = ("_floor", "_size", "_slots", "_start", "_write_cursor")

    def __init__(self, size: int, start: int = 0) -> None:
        """Hold up to `size` items (at least 1), the first of which gets position `start`."""
        if size < 1:
            raise ValueError(f"A ring buffer holds at least 1 item, not {size}.")
        if start < 0:
            raise ValueError(f"Positions start at 0 or above, not at {start}.")
        self._size = size
        self._start = start
        self._floor = start
        self._write_cursor = start
        self._slots: list[T | None] = []

    def __len__(self) -> int:
        """Return how many items are held."""
        return self._write_cursor - self.first

    @property
    def size(self) -> int:
        """How many items are held at most."""
        return self._size

    @property
    def write_cursor(self) -> int:
        """The position of the next item: `start` plus the count of all ever written."""
        return self._write_cursor

    @property
    def first(self) -> int:
        """The position of the oldest item held; the write cursor if there is none."""
        return max(self._floor, self._write_cursor - self._size)

    def append(self, item: T) -> int:
        """Write an item, over the oldest one if the ring is full; return its position."""
        position = self._write_cursor
        slot = (position - self._start) % self._size
        if slot == len(self._slots):
            self._slots.append(item)
        else:
            self._slots[slot] = item
        self._write_cursor = position + 1
        return position

    def extend(self, items: Sequence[T]) -> int:
        """Write the items in order; return the position of the first of them."""
        position = self._write_cursor
        for item in items:
            self.append(item)
        return position

    def discard_below(self, cursor: int) -> None:
        """Let go of the items below `cursor`, for an owner that bounds more than their number."""
        for position in range(self.first, min(cursor, self._write_cursor)):
            self._slots[(position - self._start) % self._size] = None
        self._floor = max(self._floor, min(cursor, self._write_cursor))

    def slice(self, cursor: int, limit: int | None = None) -> list[T]:
        """Return the items from `cursor` on, in order, at most `limit` of them.

        Empty at the write cursor. `ValueError` where there is none to give, rather than
        later items in its place: below `first`, and beyond the write cursor.
        """
        if not self.first <= cursor <= self._write_cursor:
            raise ValueError(
                f"Cursor {cursor} is not between {self.first} and {self._write_cursor}; "
                "ask decide() first."
            )
        count = self._write_cursor - cursor
        if limit is not None:
            count = min(count, max(limit, 0))
        slot = (cursor - self._start) % self._size
        items: list[Any] = self._slots[slot : slot + count]
        if len(items) < count:  # over the end of the list: the rest stands at its front
            items += self._slots[: count - len(items)]
        return cast(list[T], items)

    def decide(self, cursor: int) -> Decision:
        """Say what a reader at `cursor` needs; see `decide`."""
        return decide(cursor, first=self.first, write_cursor=self._write_cursor)
