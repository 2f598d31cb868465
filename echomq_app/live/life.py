"""One life of a stream, as far as this process has seen it: its newest records, in a ring."""

from __future__ import annotations

from ..core.records import token_of
from ..core.ring import RingBuffer
from ..core.tokens import NO_EPOCH
from .items import Item

RING_RECORDS = 5_000
RING_BYTES = 8_000_000


class Life:
    """Ends when the stream is deleted and made anew, restored, or its history replaced.

    A stream that doesn't exist has one too, without a record: it ends when the stream is created.
    """

    __slots__ = ("ended", "epoch", "first", "head_tail", "ring", "ring_bytes")

    def __init__(self, epoch: str, first: int, head: int, head_tail: str) -> None:
        self.ended = ""
        """Why it is over: `epoch`, `diverged`, `ahead` or `trimmed`."""
        self.epoch = epoch
        self.first = first
        self.head_tail = head_tail
        self.ring: RingBuffer[Item] = RingBuffer(RING_RECORDS, start=head)
        self.ring_bytes = 0

    @classmethod
    def before_stream(cls) -> Life:
        """Return that of a stream which doesn't exist."""
        return cls(NO_EPOCH, 0, 0, "")

    @property
    def precedes_stream(self) -> bool:
        """Whether the stream doesn't exist."""
        return self.epoch == NO_EPOCH

    @property
    def head(self) -> int:
        return self.ring.write_cursor

    @property
    def token(self) -> str:
        return token_of(self.epoch, self.head, self.head_tail)

    def add(self, items: list[Item]) -> None:
        """Take new items into the ring, and let the oldest go by number and by bytes."""
        ring = self.ring
        for item in items:
            if len(ring) == ring.size:
                self.ring_bytes -= ring.slice(ring.first, 1)[0].size
            ring.append(item)
            self.ring_bytes += item.size
        self.grew(0)
        if items:
            self.head_tail = items[-1].tail

    def grew(self, size: int) -> None:
        """Count what an item in the ring holds in addition, and let the oldest go."""
        self.ring_bytes += size
        ring = self.ring
        while self.ring_bytes > RING_BYTES and len(ring) > 1:
            self.ring_bytes -= ring.slice(ring.first, 1)[0].size
            ring.discard_below(ring.first + 1)
