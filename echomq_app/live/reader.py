"""One page's place in a stream: what to send it next, from the ring or the database.

A reader never blocks and never waits: `take` gives what is there, and `wake` is called
when there may be more. So one that is slow, or never comes back, costs a cursor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ..core.records import token_of
from ..core.ring import CaughtUp, Gap
from ..core.tokens import Place, requested_cursor, verify
from ..exceptions import CursorInvalid
from .items import Filter, Item, Mask

if TYPE_CHECKING:
    from .life import Life
    from .pages import LoadedPage
    from .tail import StreamTail

SCAN = 2_000
"""Items that one `take` looks at: a filter that matches nothing must not hold the loop."""
SKIPPED = 500
"""So many filtered records are worth a message that says only how far it has come."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Where a reader begins. `recovered`: what was asked for follows from there."""

    epoch: str
    cursor: int
    first: int
    head: int
    resume: str
    recovered: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Records in order, as JSON. None at all: everything up to `cursor` was filtered."""

    records: list[msgspec.Raw]
    size: int
    since: int
    cursor: int
    epoch: str
    resume: str
    head: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """What lies between `requested` and `cursor` does not come; why, and what there is."""

    reason: str
    requested: int | None
    first: int
    head: int
    epoch: str
    cursor: int
    resume: str


class _Stretch(NamedTuple):
    """Some items, and the cursor after them: past what a filter skipped."""

    items: Sequence[Item]
    end: int
    end_tail: str
    grew: Callable[[int], object]
    """Counts what an item holds in addition, where the items are held."""


class Reader:
    """Reads one stream for one page. From `Hub.open`; `close` it."""

    opened: Opened

    def __init__(
        self,
        tail: StreamTail,
        life: Life,
        only: Filter,
        mask: Mask | None,
        wake: Callable[[], object],
    ) -> None:
        self.wake = wake
        self._tail = tail
        self._life = life
        self._only = only
        self._mask = mask
        self._cursor = life.head
        self._cursor_tail = life.head_tail
        self._sent = life.head  # what the page has been told; behind the cursor by skipped ones
        self._notice: Expired | None = None
        self._page: LoadedPage | None = None
        self._waits = False  # for a page, which calls `_page_came`

    async def begin(self, place: int | str | None) -> None:
        """Go to a place: a token, a cursor, `first`, or `head` (`None`)."""
        life, tail = self._life, self._tail
        recovered = True
        if place == "first":
            self._move(life.first, await tail.pages.tail_before(life, life.first))
        elif place not in ("head", None):
            cursor, _, _ = requested_cursor(place)
            before = "" if cursor is None else await tail.pages.tail_before(life, cursor)
            error = verify(
                Place(
                    stream=tail.name,
                    epoch=life.epoch,
                    first_position=life.first,
                    write_cursor=life.head,
                    tail_before=before,
                ),
                place,
            )
            recovered = error is None
            if error is None and cursor is not None:
                self._move(cursor, before)
            else:
                reason = error.reason if isinstance(error, CursorInvalid) else "trimmed"
                self._notice = self._expired(reason, cursor)
        self._sent = self._cursor
        self.opened = Opened(
            epoch=life.epoch,
            cursor=self._cursor,
            first=life.first,
            head=life.head,
            resume=token_of(life.epoch, self._cursor, self._cursor_tail),
            recovered=recovered,
        )

    def take(self, most: int, most_bytes: int) -> Batch | Expired | None:
        """Return what comes next: at least one record, however large, if there is one.

        `None`: nothing now; `wake` is called when there may be. Raises `UnknownStream`
        when the stream was deleted.
        """
        if self._tail.failure is not None:
            raise self._tail.failure
        if self._notice is not None:
            notice, self._notice = self._notice, None
            return notice
        life = self._tail.life
        if life is not self._life:
            if life is None:
                return None
            before, self._life, self._waits = self._life, life, False
            if not before.precedes_stream:  # else all that there is follows from its place
                return self._expired(before.ended, self._sent)
        return self._fill(most, most_bytes)

    @property
    def waits_for_stream(self) -> bool:
        """Whether the stream doesn't exist, as far as the hub knows."""
        return self._tail.life is not None and self._tail.life.precedes_stream

    def close(self) -> None:
        """Stop reading."""
        self.wake = _nobody
        self._tail.leave(self)

    def _fill(self, most: int, most_bytes: int) -> Batch | Expired | None:
        records: list[msgspec.Raw] = []
        size = scanned = 0
        full = False
        sees_all = not self._only and self._mask is None
        while not full and scanned < SCAN:
            stretch = self._next_items(most - len(records))
            if isinstance(stretch, str):
                if not records:
                    return self._expired(stretch, self._sent)
                break  # first what there is; then this is found again
            if stretch is None:
                break
            last: Item | None = None
            for item in stretch.items:
                raw = item.raw if sees_all else self._shown(item, stretch.grew)
                if raw is not None:
                    if records and size + len(item.raw) > most_bytes:
                        full = True
                        break
                    records.append(raw)
                    size += len(item.raw)
                last = item
            else:
                self._move(stretch.end, stretch.end_tail)
                full = len(records) >= most or size >= most_bytes
                last = None
            scanned += len(stretch.items)
            if last is not None:
                self._move(last.position + 1, last.tail)
        if scanned >= SCAN:
            self.wake()
        if not records and self._cursor - self._sent < SKIPPED:
            return None
        since, self._sent = self._sent, self._cursor
        return Batch(
            records=records,
            size=size,
            since=since,
            cursor=self._cursor,
            epoch=self._life.epoch,
            resume=token_of(self._life.epoch, self._cursor, self._cursor_tail),
            head=max(self._life.head, self._cursor),
        )

    def _shown(self, item: Item, grew: Callable[[int], object]) -> msgspec.Raw | None:
        if not self._only.matches(item):
            return None
        return item.shown(self._mask, self._tail.name, self._life.epoch, grew)

    def _next_items(self, limit: int) -> _Stretch | str | None:
        """Return items from the cursor on: from the ring, else the database.

        `None`: nothing now. A text: why nothing can come from there any more.
        """
        life, cursor = self._life, self._cursor
        if cursor > life.head:
            return None  # a page from the database was newer than the ring
        match life.ring.decide(cursor):
            case CaughtUp():
                self._page = None
                return None
            case Gap():
                self._page = None
                items = life.ring.slice(cursor, limit)
                return _Stretch(items, items[-1].position + 1, items[-1].tail, life.grew)
        if self._waits:
            return None
        page = self._page
        if page is None or not self._only or not page.start <= cursor < page.end:
            page = self._tail.pages.at(life, cursor, self._only, self._page_came)
        self._page = page if self._only else None  # of no use to other readers
        self._waits = page is None
        if page is None:
            return None
        if page.first > life.head:
            self._tail.poke()  # all that the ring knows is gone, and it hasn't heard
            return None
        if page.first > cursor:
            life.first = max(life.first, page.first)
            return "trimmed"
        if page.end <= cursor:
            # Records that were committed are gone, and nobody moved `first_position`.
            return "diverged"
        self._tail.pages.prefetch(life, page.end, self._only)
        items, grew = page.at(cursor), partial(self._tail.pages.grew, page)
        if len(items) > limit:
            items = items[:limit]
            return _Stretch(items, items[-1].position + 1, items[-1].tail, grew)
        return _Stretch(items, page.end, page.end_tail, grew)

    def _page_came(self) -> None:
        self._waits = False
        self.wake()

    def _expired(self, reason: str, requested: int | None) -> Expired:
        """Go to the head, and say what that leaves out."""
        life = self._life
        self._move(life.head, life.head_tail)
        self._sent = life.head
        return Expired(
            reason=reason,
            requested=requested,
            first=life.first,
            head=life.head,
            epoch=life.epoch,
            cursor=life.head,
            resume=life.token,
        )

    def _move(self, cursor: int, tail: str) -> None:
        self._cursor, self._cursor_tail = cursor, tail


def _nobody() -> None:
    pass
