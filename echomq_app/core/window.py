"""Flow control: what of a subscription is on its way, unacknowledged.

A server may buffer without end for a client that doesn't read, and tells nobody. So the
sender counts what was acknowledged, and sends no more than a window of the rest.
"""

from __future__ import annotations

from collections import deque


class Window:
    """What was sent up to which cursor, and how much more may be."""

    __slots__ = ("_acked", "_bytes", "_cursor", "_most_bytes", "_most_records", "_records", "_sent")

    def __init__(self, *, records: int, bytes: int, cursor: int = 0) -> None:
        """Allow so many records and bytes; begin at `cursor`."""
        self._most_records, self._most_bytes = records, bytes
        self._records = self._bytes = 0
        self._cursor = self._acked = cursor
        self._sent: deque[tuple[int, int, int]] = deque()

    @property
    def room(self) -> tuple[int, int]:
        """Records and bytes that may be sent now; (0, 0) when one of them is used up.

        With nothing on its way there is always room for a record, however large.
        """
        records = self._most_records - self._records
        size = self._most_bytes - self._bytes
        return (records, size) if records > 0 and size > 0 else (0, 0)

    @property
    def is_full(self) -> bool:
        """Whether something has to be acknowledged first."""
        return self.room == (0, 0)

    def sent(self, cursor: int, *, records: int, bytes: int) -> None:
        """Note what was sent, up to `cursor`."""
        self._cursor = cursor
        if records:
            self._sent.append((cursor, records, bytes))
            self._records += records
            self._bytes += bytes

    def jumped(self, cursor: int) -> None:
        """Note that what follows begins at `cursor`, which may lie below: another history."""
        self._cursor = self._acked = cursor
        self._sent.clear()
        self._records = self._bytes = 0

    def acked(self, cursor: int) -> bool:
        """Note that everything before `cursor` is dealt with; tell whether that makes room.

        Late and repeated ones are fine, and so is one that crossed the notice of another
        history, whose cursors are lower: nothing above what was sent is ever acknowledged.
        """
        if cursor > self._cursor:
            return False
        self._acked = max(self._acked, cursor)
        before = len(self._sent)
        while self._sent and self._sent[0][0] <= self._acked:
            _, records, size = self._sent.popleft()
            self._records -= records
            self._bytes -= size
        return len(self._sent) < before
