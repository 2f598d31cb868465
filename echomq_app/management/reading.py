"""Which records a command reads: where it begins, what it skips, where it ends."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
from collections.abc import Iterator

from ..core.records import Page, StreamRecord
from ..exceptions import UnknownStream
from ..stream import Stream

_PAGE = 1_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What to read of a stream."""

    begin: int | str = "beginning"
    """A cursor, a resume token, `beginning` or `end`."""
    since: dt.datetime | None = None
    last: int | None = None
    types: list[str] | None = None
    key: str | None = None
    limit: int | None = None

    def start(self, stream: Stream) -> int | str | None:
        """Find the place to begin at; `None` is the oldest retained record."""
        if self.since is not None:
            return stream.cursor_at(self.since)
        if self.last is not None:
            info = stream.info()
            return max(info.first_position, info.write_cursor - self.last)
        if self.begin == "end":
            return stream.info().token
        return None if self.begin == "beginning" else self.begin

    def pages(self, stream: Stream) -> Iterator[Page]:
        """Read to the write cursor as it is at the start, or to the limit."""
        wanted, end, place = self.limit, None, self.start(stream)
        while True:
            size = _PAGE if wanted is None else min(_PAGE, wanted)
            page = stream.read(place, limit=size, types=self.types, key=self.key)
            yield page
            end = page.write_cursor if end is None else end
            if wanted is not None:
                wanted -= len(page.records)
            if wanted == 0 or page.cursor >= end:
                return
            place = page.token

    def records(self, stream: Stream) -> Iterator[StreamRecord]:
        """Read records like `pages`, one by one."""
        for page in self.pages(stream):
            yield from page.records

    def follow(self, stream: Stream) -> Iterator[StreamRecord]:
        """Read on for ever, or to the limit; wait for a stream that doesn't exist yet."""
        try:
            place = self.start(stream)
        except UnknownStream:
            place = None
        records = stream.tail(place, types=self.types, key=self.key)
        return itertools.islice(records, self.limit)
