"""The sending half: a ring of what was written, and how far each node has got.

What a node needs is decided by `core.ring.decide` and by nothing else. A node's `read`
cursor moves on its own word only: an ack, or what its hello says that it expects. One
frame per node is in flight; it holds at most `max_batch` records and is acked by itself.

An expired node gets a frame that begins at the write cursor as it was when the frame was
first prepared (`jump`), with the records from there on: on a busy producer a resent
notice doesn't run after the write cursor for ever, and a lost one leaves no hole.

Nothing here takes a lock: the ring is written by any thread, so its owner holds one.
"""

from __future__ import annotations

import dataclasses

from ..ring import CaughtUp, Expired, RingBuffer
from .frames import Record

MAX_FRAME_BYTES = 1_000_000
"""What the payloads of one frame amount to at most, unless a single one is larger."""


@dataclasses.dataclass(slots=True)
class Link:
    """How far one node has got with one producer."""

    read: int
    """The next position that it needs; all before it is acked."""
    sent: int
    """The end of the furthest frame that was sent to it. No ack counts beyond it."""
    target: int
    """It is sent what is before this; a flush moves it to the write cursor."""
    limit: int
    """Records per frame: halved when a frame isn't acked in time, doubled when one is acked."""
    jump: int | None = None
    """Where the frame begins that carries a notice, until it is acked."""
    in_flight: tuple[int, int] | None = None
    """Base and end of the frame that awaits its ack."""
    given_up: int | None = None
    """End of a frame for which the limit was halved. Its ack may come yet."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """The next frame for a node. `missed` counts what it will never get."""

    base: int
    records: list[Record]
    missed: int = 0


class Producer:
    """One producer of a node: its ring, and a `Link` for each node that listens."""

    def __init__(self, size: int, max_batch: int) -> None:
        self.ring: RingBuffer[Record] = RingBuffer(size)
        self.links: dict[str, Link] = {}
        self._max_batch = max_batch

    def write(self, record: Record) -> int:
        """Keep a record for all nodes; return its position."""
        return self.ring.append(record)

    def seat(self, boot: str, cursor: int) -> bool:
        """Note that node `boot` says it expects `cursor` next; False if that can't be.

        A node seats itself: one that has just met us says our write cursor, one that
        comes back says where it stopped.
        """
        if not 0 <= cursor <= self.ring.write_cursor:
            return False
        link = self.links.get(boot)
        if link is None:
            head = self.ring.write_cursor
            self.links[boot] = Link(read=cursor, sent=cursor, target=head, limit=self._max_batch)
        else:
            self._settle(link, cursor)
        return True

    def flush(self) -> int:
        """Let all that is written go out; return how many nodes need something."""
        head = self.ring.write_cursor
        for link in self.links.values():
            link.target = head
        return sum(link.read < head for link in self.links.values())

    def due(self, boot: str) -> Due | None:
        """Return the next frame for the node and hold it in flight; None if there is none."""
        link = self.links.get(boot)
        if link is None or link.in_flight or link.read >= link.target:
            return None
        decision = self.ring.decide(link.read)
        if isinstance(decision, CaughtUp):
            return None
        missed = 0
        if isinstance(decision, Expired):
            if link.jump is None or link.jump < self.ring.first:
                link.jump = self.ring.write_cursor
            missed = link.jump - link.read
        else:
            link.jump = None
        base = link.read if link.jump is None else link.jump
        records = _fitting(self.ring.slice(base, link.limit))
        end = base + len(records)
        link.in_flight = (base, end)
        link.sent = max(link.sent, end)
        return Due(base=base, records=records, missed=missed)

    def ack(self, boot: str, cursor: int) -> bool:
        """Take an ack; tell whether it settles the frame in flight."""
        link = self.links.get(boot)
        return link is not None and self._settle(link, min(cursor, link.sent))

    def failed(self, boot: str) -> None:
        """Give up the frame in flight: it will be sent again, a smaller one next time."""
        link = self.links.get(boot)
        if link is not None and link.in_flight is not None:
            link.given_up, link.in_flight = link.in_flight[1], None
            link.limit = max(1, link.limit // 2)

    def forget(self, boot: str) -> None:
        """Keep nothing more about a node."""
        self.links.pop(boot, None)

    def lag(self, boot: str) -> int:
        """Return how many records the node is behind; 0 for one that isn't known."""
        link = self.links.get(boot)
        return 0 if link is None else self.ring.write_cursor - link.read

    def is_expired(self, boot: str) -> bool:
        """Tell whether the node needs records that are gone."""
        link = self.links.get(boot)
        return link is not None and link.read < self.ring.first

    def _settle(self, link: Link, cursor: int) -> bool:
        if cursor > link.read:
            link.read = cursor
            link.sent = max(link.sent, cursor)
            if link.jump is not None and cursor >= link.jump:
                link.jump = None
        settles = link.in_flight is not None and cursor >= link.in_flight[1]
        if settles or (link.given_up is not None and cursor >= link.given_up):
            link.given_up = None
            link.limit = min(self._max_batch, link.limit * 2)
        if settles:
            link.in_flight = None
        return settles


def _fitting(records: list[Record]) -> list[Record]:
    """Return as many of them as one frame should carry, at least one if there is one."""
    size = 0
    for count, (_, payload) in enumerate(records):
        size += len(payload)
        if size > MAX_FRAME_BYTES and count:
            return records[:count]
    return records
