"""The log's values: what a caller appends, and what comes back."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import msgspec

from ..exceptions import InvalidName, InvalidPayload
from .ids import EventId, tail_of
from .names import IDEMPOTENCY_KEY_MAX, KEY_MAX, TYPE_MAX
from .payload import encode
from .tokens import ResumeToken


class NewRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One record to append. Only `data` is required; it may be any JSON value."""

    data: Any
    type: str = ""
    key: str = ""
    headers: Mapping[str, Any] | None = None
    idempotency_key: str = ""


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """Where an appended record stands.

    Final once the transaction that appended it has committed. `cursor` and `token` are
    those of a reader that has read up to and including this record. `duplicate`: the
    idempotency key was known, so this is the first append's receipt and nothing was
    written.
    """

    id: EventId
    stream: str
    position: int
    epoch: str
    recorded_at: dt.datetime
    duplicate: bool = False

    @property
    def cursor(self) -> int:
        return self.position + 1

    @property
    def token(self) -> str:
        return f"{self.epoch}:{self.position + 1}:{self.id.tail}"


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One record as it was read. `cursor` and `token` resume after it."""

    id: EventId
    stream: str
    epoch: str
    position: int
    type: str
    key: str
    data: Any
    headers: dict[str, Any]
    recorded_at: dt.datetime

    @property
    def cursor(self) -> int:
        return self.position + 1

    @property
    def tail(self) -> str:
        return self.id.tail

    @property
    def token(self) -> str:
        return f"{self.epoch}:{self.position + 1}:{self.id.tail}"


class StoredRecord(msgspec.Struct, gc=False):
    """One record as it goes to pages: its place, and all of it as JSON, not parsed.

    `bits` are those of its id.
    """

    position: int
    bits: int
    raw: msgspec.Raw

    @property
    def cursor(self) -> int:
        return self.position + 1

    @property
    def tail(self) -> str:
        return tail_of(self.bits)


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Some records and where to go on, all from one snapshot.

    `cursor` (and `token`, the same place in a checkable form) is the next position that
    is still needed: past what a filter skipped, too. `cursor == write_cursor` means
    caught up; an empty page by itself doesn't.
    """

    records: list[StreamRecord]
    cursor: int
    token: str
    first_position: int
    write_cursor: int
    epoch: str

    @property
    def caught_up(self) -> bool:
        return self.cursor >= self.write_cursor


class StreamInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream holds now. `token` is that of the head.

    `clock_ahead` is how far the newest record's time lies in the future: a writer's
    clock had jumped, and until it is past, new records carry that same time.
    """

    name: str
    epoch: str
    first_position: int
    write_cursor: int
    token: str
    created_at: dt.datetime
    oldest_at: dt.datetime | None
    newest_at: dt.datetime | None
    clock_ahead: dt.timedelta
    max_records: int | None
    max_age: dt.timedelta | None

    @property
    def count(self) -> int:
        return self.write_cursor - self.first_position


class TrimResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a trim did, or would do: the new oldest position, and how many it removes.

    `error` says why retention failed for this stream; it is empty where it didn't.
    """

    stream: str
    first_position: int
    trimmed: int
    dry_run: bool
    error: str = ""


def as_record(given: NewRecord | Mapping[str, Any]) -> NewRecord:
    """Return a mapping with the fields of `NewRecord` as one."""
    if isinstance(given, NewRecord):
        return given
    if type(given) is not dict and not isinstance(given, Mapping):
        raise InvalidPayload(
            f"A record is a dict or a NewRecord, not {type(given).__name__}; "
            "put your value under 'data'."
        )
    try:
        return NewRecord(**given)
    except TypeError:
        raise InvalidPayload(
            "A record has 'data', and may have 'type', 'key', 'headers' and 'idempotency_key'; "
            f"got {', '.join(sorted(map(repr, given)))}."
        ) from None


def encode_record(record: NewRecord, *, limit: int) -> bytes:
    """Check a record and return it as one JSON object. `limit`: bytes of data and headers."""
    # The parts are joined by hand: batches come by the thousand, and a struct of texts that
    # are JSON already takes as long to make and encode as all the rest.
    data = encode(record.data, limit=limit)
    parts = [b'{"data":', data]
    if record.type != "":
        parts += b',"type":', _label(record.type, "type", TYPE_MAX)
    if record.key != "":
        parts += b',"key":', _label(record.key, "key", KEY_MAX)
    if record.headers:
        if not isinstance(record.headers, Mapping):
            raise InvalidPayload(
                f"headers are a dict, not {type(record.headers).__name__}; leave them out if none."
            )
        headers = encode(dict(record.headers), limit=limit - len(data), what="headers")
        parts += b',"headers":', headers
    if record.idempotency_key != "":
        key = _label(record.idempotency_key, "idempotency_key", IDEMPOTENCY_KEY_MAX)
        parts += b',"idempotency_key":', key
    parts.append(b"}")
    return b"".join(parts)


def check_filter(types: Collection[str] | None, key: str | None) -> None:
    """Raise for a type or key to look for that no record can have: no database takes it."""
    for type in types or ():
        _label(type, "type", TYPE_MAX)
    if key is not None:
        _label(key, "key", KEY_MAX)


def token_of(epoch: str, cursor: int, tail: str) -> str:
    """Put a resume token together."""
    return str(ResumeToken(epoch, cursor, tail))


def _label(text: str, field: str, longest: int) -> bytes:
    """Return a type or key as JSON; raise if it can't be one."""
    if not isinstance(text, str):  # before the cache, which takes nothing unhashable
        raise InvalidName(f"A record's {field} is a str, not {type(text).__name__}.")
    return _label_json(text, field, longest)


@lru_cache(maxsize=4_096)  # types are few, and keys come again
def _label_json(text: str, field: str, longest: int) -> bytes:
    if len(text) > longest:
        raise InvalidName(
            f"A record's {field} has at most {longest} characters, this has {len(text)}."
        )
    return encode(text, what=field)
