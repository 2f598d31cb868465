"""A record on its way to pages: encoded once per process, whoever reads it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Protocol

import msgspec

from ..core.frames import RecordHead, WireRecord, encode_record, record_head
from ..core.ids import EventId
from ..core.payload import decode, encode
from ..core.records import StoredRecord, StreamRecord
from ..exceptions import InvalidPayload
from ..models.times import aware

logger = logging.getLogger("echomq")

_KEPT_MASKS = 16
_OVERHEAD = 200
_WORD = 60
"""Bytes of a short string, its place in a set included."""


class Mask(Protocol):
    """What a group of users may see of a record. Equal keys see the same."""

    @property
    def key(self) -> Hashable:
        """Names the group: a record is masked and encoded once for each key."""

    def __call__(self, record: StreamRecord) -> StreamRecord | None:
        """Return the record as it may be seen, or `None` to leave it out."""


@dataclasses.dataclass(frozen=True, slots=True)
class Filter:
    """Which records a reader wants; all of them when both are `None`."""

    types: frozenset[str] | None = None
    key: str | None = None

    @classmethod
    def of(cls, types: Collection[str] | None, key: str | None) -> Filter:
        return cls(None if types is None else frozenset(types), key)

    def __bool__(self) -> bool:
        return self.types is not None or self.key is not None

    @property
    def size(self) -> int:
        """How many bytes it holds, about."""
        words = (*(self.types or ()), self.key or "")
        return sum(len(word) + _WORD for word in words)

    def matches(self, item: Item) -> bool:
        """Tell whether a record is wanted."""
        return item.matches(self.types, self.key)


EVERYTHING = Filter()


class Item(StoredRecord, gc=False):
    """One record as JSON, with what a reader has to know to place and filter it."""

    labels: RecordHead | None = None
    masked: dict[Hashable, msgspec.Raw | None] | None = None
    size: int = 0
    """How many bytes it holds, about: it grows with what is kept for masks."""

    def __post_init__(self) -> None:
        self.size = len(self.raw) + _OVERHEAD

    def matches(self, types: Collection[str] | None, key: str | None) -> bool:
        """Tell whether it is of one of these types and has this key; `None`: any."""
        labels = self.labels
        if labels is None:
            labels = self.labels = record_head(self.raw)
        return (types is None or labels.type in types) and (key is None or labels.key == key)

    def shown(
        self,
        mask: Mask | None,
        stream: str,
        epoch: str,
        grew: Callable[[int], object] | None = None,
    ) -> msgspec.Raw | None:
        """Return the JSON that a reader with this mask gets; `None`: nothing.

        It is kept, and `grew` is called with the bytes that this takes.
        """
        if mask is None:
            return self.raw
        if self.masked is None:
            self.masked = {}
        key = mask_key(mask)
        try:
            return self.masked[key]
        except KeyError:
            raw = self._masked(mask, stream, epoch)
            # Keys for groups of users pay; a key for each user would keep a copy for each.
            if len(self.masked) < _KEPT_MASKS:
                self.masked[key] = raw
                more = _OVERHEAD + (0 if raw is None else len(raw))
                self.size += more
                if grew is not None:
                    grew(more)
            return raw

    def _masked(self, mask: Mask, stream: str, epoch: str) -> msgspec.Raw | None:
        """Return what a mask makes of it. What no mask can be asked about, nobody under one sees.

        To fail would end the subscription, which comes again at the same record, for ever.
        """
        try:
            record = _parsed(self.raw, stream, epoch)
        except (ValueError, RecursionError) as error:
            _log_left_out(stream, self.position, error)
            return None
        seen = mask(record)
        try:
            return None if seen is None else msgspec.Raw(_encoded(seen))
        except InvalidPayload as error:
            if _is_storable(record):
                raise  # the mask made it so
            _log_left_out(stream, self.position, error)
            return None


def mask_key(mask: Mask | None) -> Hashable:
    """Return what tells one mask from others: its kind too, lest two kinds chose the same key."""
    if mask is None:
        return None
    kind = type(mask)
    return kind.__module__, kind.__qualname__, mask.key


def size_of(items: Iterable[Item]) -> int:
    """Return how many bytes items hold, about."""
    return sum(item.size for item in items)


def _parsed(raw: msgspec.Raw, stream: str, epoch: str) -> StreamRecord:
    wire = msgspec.json.decode(raw, type=WireRecord)
    return StreamRecord(
        id=EventId.parse(wire.id),
        stream=stream,
        epoch=epoch,
        position=wire.position,
        type=wire.type,
        key=wire.key,
        data=decode(bytes(wire.data)),
        headers=decode(bytes(wire.headers)),
        recorded_at=aware(wire.recorded_at, None),
    )


def _log_left_out(stream: str, position: int, error: Exception) -> None:
    logger.error(
        "event=record_left_out stream=%s position=%d error=%s: %s",
        stream,
        position,
        type(error).__name__,
        "SQL wrote data that can't be decoded, so no mask can be asked about it.",
    )


def _is_storable(record: StreamRecord) -> bool:
    try:
        _encoded(record)
    except InvalidPayload:
        return False
    return True


def _encoded(record: StreamRecord) -> bytes:
    return encode_record(
        WireRecord(
            id=str(record.id),
            position=record.position,
            type=record.type,
            key=record.key,
            data=msgspec.Raw(encode(record.data)),
            headers=msgspec.Raw(encode(record.headers)),
            recorded_at=record.recorded_at.isoformat(),
        )
    )
