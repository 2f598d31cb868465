"""The stream log: append-only, dense positions, replay and resume, never a silent gap.

A *position* numbers a record from 0, without holes, in commit order. A *cursor* is the
next position that a reader still needs, so `lag = write_cursor - cursor`. A *token* is a
cursor that can be checked. A reader either gets every record from its cursor on, in
order, or an error that says what happened: `CursorExpired` (trimmed), `CursorInvalid`
(ahead, of another epoch, or history has diverged).

    with transaction.atomic():
        order.save()
        Stream("orders").append({"id": order.id}, type="placed", key=str(order.id))

`append` holds the stream's lock to the end of the transaction: right in short ones. In a
request that runs in one (ATOMIC_REQUESTS), use `append_on_commit`.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from . import following
from .cancel import CancelToken
from .core.records import NewRecord, Page, Receipt, StreamInfo, StreamRecord, TrimResult
from .following import Cursor
from .log import REPLAY_PAGE, Log
from .models import appending
from .models.threads import in_database_thread
from .models.transactions import own_transaction

__all__ = [
    "NewRecord",
    "Page",
    "Receipt",
    "Stream",
    "StreamInfo",
    "StreamRecord",
    "TrimResult",
    "append_all",
]


class Stream(Log):
    """One log, by name, for sync and async code.

    Verbs with an `a` in front are the same for async code. Django has no async
    transactions: each runs in a thread, in a transaction of its own.
    """

    async def aappend(self, data: Any, **options: Any) -> Receipt:
        """See `append`."""
        return await in_database_thread(self.append, data, **options)

    async def aappend_many(
        self, records: Sequence[NewRecord | Mapping[str, Any]], **options: Any
    ) -> list[Receipt]:
        """See `append_many`."""
        return await in_database_thread(self.append_many, records, **options)

    async def aappend_on_commit(self, data: Any, **options: Any) -> None:
        """See `append_on_commit`."""
        await in_database_thread(self.append_on_commit, data, **options)

    async def aread(self, cursor: Cursor = None, **options: Any) -> Page:
        """See `read`."""
        return await in_database_thread(self.read, cursor, **options)

    async def areplay(self, cursor: Cursor = None, **options: Any) -> AsyncIterator[StreamRecord]:
        """See `replay`."""
        async for record in _aiterate(self.replay(cursor, **options)):
            yield record

    async def atail(self, cursor: Cursor = None, **options: Any) -> AsyncIterator[StreamRecord]:
        """See `tail`."""
        async for page in self.atail_pages(cursor, **options):
            for record in page.records:
                yield record

    async def atail_pages(
        self,
        cursor: Cursor = None,
        *,
        stop: CancelToken | None = None,
        limit: int = 1_000,
        types: Collection[str] | None = None,
        key: str | None = None,
    ) -> AsyncIterator[Page]:
        """See `tail_pages`. Cancelling the task ends it too."""
        follower = await in_database_thread(
            partial(self._follower, cursor, limit=limit, types=types, key=key)
        )
        async for page in following.apages(self.name, follower, stop, in_database_thread):
            yield page

    async def acursor_at(self, at: dt.datetime) -> int:
        """See `cursor_at`."""
        return await in_database_thread(self.cursor_at, at)

    async def awindow(self, t0: dt.datetime, t1: dt.datetime) -> AsyncIterator[StreamRecord]:
        """See `window`."""
        async for record in _aiterate(self.window(t0, t1)):
            yield record

    async def ainfo(self) -> StreamInfo:
        """See `info`."""
        return await in_database_thread(self.info)

    async def atrim(self, **options: Any) -> TrimResult:
        """See `trim`."""
        return await in_database_thread(self.trim, **options)

    async def aset_retention(self, **options: Any) -> None:
        """See `set_retention`."""
        await in_database_thread(self.set_retention, **options)

    async def arotate_epoch(self) -> str:
        """See `rotate_epoch`."""
        return await in_database_thread(self.rotate_epoch)

    async def adelete(self) -> None:
        """See `delete`."""
        await in_database_thread(self.delete)

    async def arelay(self, limit: int = 1_000) -> int | None:
        """See `relay`."""
        return await in_database_thread(self.relay, limit)


def append_all(
    batches: Mapping[str, Sequence[NewRecord | Mapping[str, Any]]], *, using: str | None = None
) -> dict[str, list[Receipt]]:
    """Append to several streams, all or none, locking them in name order.

    Transactions that append to several streams only so (or only on commit) can't
    deadlock with each other.
    """
    streams = {name: Stream(name, using=using) for name in sorted(batches)}
    encoded = {name: streams[name]._encode(batches[name]) for name in streams}
    receipts: dict[str, list[Receipt]] = {}
    if streams:
        alias = next(iter(streams.values())).using
        with own_transaction(alias):
            for name, records in encoded.items():
                receipts[name] = appending.append(alias, name, records)
                if records:
                    streams[name]._wake()
    return receipts


async def _aiterate(iterator: Iterator[StreamRecord]) -> AsyncIterator[StreamRecord]:
    """Iterate a sync generator from async code, a page's worth of records per thread hop."""

    def some() -> list[StreamRecord]:
        return [record for _, record in zip(range(REPLAY_PAGE), iterator, strict=False)]

    while records := await in_database_thread(some):
        for record in records:
            yield record
