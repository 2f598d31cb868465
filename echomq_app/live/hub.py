"""The hub: one tail per stream, however many pages read it.

    hub = hub_of_this_loop()
    reader = await hub.open("orders", token, wake=event.set)
    while True:
        taken = reader.take(500, 256_000)      # Batch, Expired, or None: wait for the event

One hub per event loop, which under an ASGI server is one per process.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Collection

from django.db import router

from ..core.names import check_stream_name
from ..core.records import check_filter
from ..models import Record
from .heads import Heads
from .items import Filter, Mask
from .pages import Pages
from .reader import Batch, Expired, Opened, Reader
from .tail import StreamTail
from .threads import DatabaseThreads

__all__ = ["Batch", "Expired", "Hub", "Mask", "Opened", "Reader", "hub_of_this_loop"]

_hubs: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Hub] = weakref.WeakKeyDictionary()


class Hub:
    """Opens readers on streams, and shares what they read."""

    def __init__(self) -> None:
        self._tails: dict[tuple[str, str], StreamTail] = {}
        self._heads: dict[str, Heads] = {}
        self._pages = Pages()
        self._threads = DatabaseThreads()

    async def open(
        self,
        name: str,
        place: int | str | None = None,
        *,
        wake: Callable[[], object],
        types: Collection[str] | None = None,
        key: str | None = None,
        mask: Mask | None = None,
        using: str | None = None,
    ) -> Reader:
        """Return a reader at `place`: a resume token, a cursor, `first`, or `head` (`None`).

        A stream that doesn't exist is followed until it does, from its first record on; reading
        never creates it. A place that is no longer valid isn't an error: the reader's first
        `take` says so, with `Expired`. `wake` is called in this loop
        when there may be something to take. Raises `InvalidName`, and `InvalidPayload` for a
        filter that no record can match; waits while the database is away.
        """
        check_stream_name(name)
        check_filter(types, key)
        tail = self._tail(name, using or router.db_for_write(Record))
        only = Filter.of(types, key)
        with tail.held():
            # A token that fits what was seen last needs no look of its own: of a thousand pages
            # that come back, nearly all have one. One that doesn't fit may be newer than that;
            # one that has ceased to fit since is told so like any page that was there.
            is_token = isinstance(place, str) and place not in ("head", "first")
            life = tail.life if is_token else None
            if life is not None:
                reader = Reader(tail, life, only, mask, wake)
                await reader.begin(place)
            if life is None or life is not tail.life or not reader.opened.recovered:
                reader = Reader(tail, await tail.look(), only, mask, wake)
                await reader.begin(place)
            tail.readers.add(reader)
        return reader

    def _tail(self, name: str, using: str) -> StreamTail:
        tail = self._tails.get((name, using))
        if tail is None:
            heads = self._heads.setdefault(using, Heads(using, self._threads))
            tail = StreamTail(name, using, self._threads, heads, self._pages, self._ended)
            self._tails[name, using] = tail
        return tail

    def _ended(self, tail: StreamTail) -> None:
        if self._tails.get((tail.name, tail.using)) is tail:
            del self._tails[tail.name, tail.using]


def hub_of_this_loop() -> Hub:
    """Return the hub of the running event loop."""
    loop = asyncio.get_running_loop()
    hub = _hubs.get(loop)
    if hub is None:
        hub = _hubs[loop] = Hub()
    return hub
