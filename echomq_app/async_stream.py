"""The async twins of the log's verbs. Django has no async transactions: each runs in a thread.

Each calls the verb without the `a`, whose docstring says what it does.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from channels.db import database_sync_to_async

from . import following
from .cancel import CancelToken
from .core.records import NewRecord, Page, Receipt, StreamInfo, StreamRecord, TrimResult
from .following import Cursor

if TYPE_CHECKING:
    from .stream import Stream

REPLAY_PAGE = 1_000

P = ParamSpec("P")
T = TypeVar("T")


class AsyncVerbs:
    """What `Stream` says in async code."""

    async def aappend(self: Stream, data: Any, **options: Any) -> Receipt:
        """See `append`."""
        return await _in_thread(self.append, data, **options)

    async def aappend_many(
        self: Stream, records: Sequence[NewRecord | Mapping[str, Any]], **options: Any
    ) -> list[Receipt]:
        """See `append_many`."""
        return await _in_thread(self.append_many, records, **options)

    async def aappend_on_commit(self: Stream, data: Any, **options: Any) -> None:
        """See `append_on_commit`."""
        await _in_thread(self.append_on_commit, data, **options)

    async def aread(self: Stream, cursor: Cursor = None, **options: Any) -> Page:
        """See `read`."""
        return await _in_thread(self.read, cursor, **options)

    async def areplay(
        self: Stream, cursor: Cursor = None, **options: Any
    ) -> AsyncIterator[StreamRecord]:
        """See `replay`."""
        async for record in _aiterate(self.replay(cursor, **options)):
            yield record

    async def atail(
        self: Stream, cursor: Cursor = None, **options: Any
    ) -> AsyncIterator[StreamRecord]:
        """See `tail`."""
        async for page in self.atail_pages(cursor, **options):
            for record in page.records:
                yield record

    async def atail_pages(
        self: Stream,
        cursor: Cursor = None,
        *,
        stop: CancelToken | None = None,
        limit: int = 1_000,
        types: Collection[str] | None = None,
        key: str | None = None,
    ) -> AsyncIterator[Page]:
        """See `tail_pages`. Cancelling the task ends it too."""
        follower = await _in_thread(
            partial(self._follower, cursor, limit=limit, types=types, key=key)
        )
        async for page in following.apages(self.name, follower, stop, _in_thread):
            yield page

    async def acursor_at(self: Stream, at: dt.datetime) -> int:
        """See `cursor_at`."""
        return await _in_thread(self.cursor_at, at)

    async def awindow(
        self: Stream, t0: dt.datetime, t1: dt.datetime
    ) -> AsyncIterator[StreamRecord]:
        """See `window`."""
        async for record in _aiterate(self.window(t0, t1)):
            yield record

    async def ainfo(self: Stream) -> StreamInfo:
        """See `info`."""
        return await _in_thread(self.info)

    async def atrim(self: Stream, **options: Any) -> TrimResult:
        """See `trim`."""
        return await _in_thread(self.trim, **options)

    async def aset_retention(self: Stream, **options: Any) -> None:
        """See `set_retention`."""
        await _in_thread(self.set_retention, **options)

    async def arotate_epoch(self: Stream) -> str:
        """See `rotate_epoch`."""
        return await _in_thread(self.rotate_epoch)

    async def adelete(self: Stream) -> None:
        """See `delete`."""
        await _in_thread(self.delete)

    async def arelay(self: Stream, limit: int = 1_000) -> int | None:
        """See `relay`."""
        return await _in_thread(self.relay, limit)


async def _in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await database_sync_to_async(call)(*args, **kwargs)


async def _aiterate(iterator: Iterator[StreamRecord]) -> AsyncIterator[StreamRecord]:
    """Iterate a sync generator from async code, a page's worth of records per thread hop."""

    def some() -> list[StreamRecord]:
        return [record for _, record in zip(range(REPLAY_PAGE), iterator, strict=False)]

    while records := await _in_thread(some):
        for record in records:
            yield record
