"""The websocket protocol: typed frames, encoded, decoded, refused. See docs/protocol.md.

Frames are JSON objects told apart by `type`. What a client sends is checked field by
field here, so that nobody behind it has to; what we send is one struct per frame, with
the records' JSON text passed through as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Raw, Struct

from .ids import EventId, base32

SUBPROTOCOL = "echomq.v1"
SUB_MAX = 2**31 - 1
WINDOW_RECORDS = 500
WINDOW_BYTES = 256_000
WINDOW_EVENTS = 500
"""What may be on its way unacknowledged, for each subscription."""

Sub = Annotated[int, Meta(ge=0, le=SUB_MAX, description="The client's number of a subscription.")]
Cursor = Annotated[int, Meta(ge=0, le=2**53 - 1, description="The next position still needed.")]
Text = Annotated[str, Meta(max_length=255)]


class BadFrame(Exception):
    """What came is none of the client's frames; the text says what is wrong."""


class Close:
    """Close codes. A client that gets one of FATAL would get it again."""

    BAD_FRAMES = 4400
    UNAUTHENTICATED = 4401
    NOT_ACKNOWLEDGED = 4408
    TOO_LARGE = 4413
    TOO_FAST = 4429
    FAILED = 1011
    FATAL = frozenset({4400, 4401, 4413})


# From the client


class _FromClient(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    pass


class Auth(_FromClient, frozen=True, tag="auth"):
    """Be the user of this token."""

    token: Annotated[str, Meta(max_length=4_096)]


class Subscribe(_FromClient, frozen=True, tag="subscribe", kw_only=True, rename={"start": "from"}):
    """Follow a stream from a place, or a queue's events."""

    sub: Sub
    stream: Text | None = None
    events: Text | None = None
    resume: Annotated[str, Meta(max_length=255)] | None = None
    start: Cursor | Annotated[str, Meta(pattern="^(first|head)$")] | None = None
    types: Annotated[list[Text], Meta(max_length=100)] | None = None
    key: Text | None = None

    def __post_init__(self) -> None:
        if (self.stream is None) == (self.events is None):
            raise ValueError("a subscribe names a stream or events, one of them")
        if self.events is not None and (self.place, self.types, self.key) != (None, None, None):
            raise ValueError("events have no place, types or key: they are not kept")
        if self.resume is not None and self.start is not None:
            raise ValueError("a subscribe has resume or from, not both")

    @property
    def place(self) -> str | int | None:
        """What stands in `resume` or `from`, `None` without them."""
        return self.start if self.resume is None else self.resume


class Ack(_FromClient, frozen=True, tag="ack"):
    """Everything before this cursor is dealt with."""

    sub: Sub
    cursor: Cursor


class Unsubscribe(_FromClient, frozen=True, tag="unsubscribe"):
    """Nothing more of this subscription."""

    sub: Sub


class Ping(_FromClient, frozen=True, tag="ping"):
    """Are you there?"""


ClientFrame = Auth | Subscribe | Ack | Unsubscribe | Ping


# From the server


class _FromServer(Struct, frozen=True, tag_field="type", kw_only=True):
    pass


class Welcome(_FromServer, frozen=True, tag="welcome"):
    """First on each socket, and after each `auth`."""

    user: Annotated[bool, Meta(description="Whether this socket is somebody's.")]


class Subscribed(_FromServer, frozen=True, tag="subscribed", omit_defaults=True):
    """A subscription begins; for events, `sub` is all there is."""

    sub: Sub
    epoch: str | None = None
    cursor: Cursor | None = None
    first: Cursor | None = None
    head: Cursor | None = None
    recovered: bool | None = None
    resume: str | None = None


class WireRecord(Struct, frozen=True, kw_only=True):
    """One record of a stream."""

    id: str
    position: Cursor
    type: str
    key: str
    data: Raw
    headers: Raw
    recorded_at: str


class Records(_FromServer, frozen=True, tag="records"):
    """Records in order; empty when all were filtered and only `resume` moved."""

    sub: Sub
    since: Annotated[int, Meta(ge=0, le=2**53 - 1, description="`cursor` of what came before.")]
    records: Sequence[Raw]
    cursor: Cursor
    resume: str
    head: Cursor


class CursorExpired(_FromServer, frozen=True, tag="cursor_expired"):
    """What lies between the place asked for and `cursor` does not come."""

    sub: Sub
    reason: str
    requested: Cursor | None
    first: Cursor
    head: Cursor
    epoch: str
    cursor: Cursor
    resume: str


class Event(_FromServer, frozen=True, tag="event"):
    """One event of a queue, at most once."""

    sub: Sub
    event: str
    job_id: str
    data: Any
    number: Cursor


class Gap(_FromServer, frozen=True, tag="gap"):
    """Events are missing here."""

    sub: Sub
    reason: str


class Unsubscribed(_FromServer, frozen=True, tag="unsubscribed"):
    """Nothing of this `sub` follows."""

    sub: Sub


class Error(_FromServer, frozen=True, tag="error", omit_defaults=True):
    """With `sub`, that subscription ended; without, something was refused."""

    code: str
    message: str
    sub: Sub | None = None


class Pong(_FromServer, frozen=True, tag="pong"):
    """The answer to a ping."""


ServerFrame = (
    Welcome | Subscribed | Records | CursorExpired | Event | Gap | Unsubscribed | Error | Pong
)

_decoder = msgspec.json.Decoder(ClientFrame | list[ClientFrame])
_encoder = msgspec.json.Encoder()


def encode(frame: ServerFrame) -> str:
    """Return a frame as the text of a websocket message."""
    return _encoder.encode(frame).decode()


def encode_record(record: WireRecord) -> bytes:
    """Return a record's JSON, to stand in frames as it is."""
    return _encoder.encode(record)


def stored_record(bits: int, rest: str) -> Raw:
    """Return the same of a record as it is stored: its id, and the rest of its fields as JSON."""
    # Put together by hand, in a fraction of the time: pages that come back read millions of these.
    return Raw(f'{{"id":"{EventId.brand}{base32(bits)}",{rest}}}'.encode())


def stored_rest(
    position: int, type: str, key: str, data: str, headers: str, recorded_at: str
) -> str:
    """Return the fields of a record but its id. `data` and `headers` are JSON."""
    return (
        f'"position":{position},"type":{_quoted(type)},"key":{_quoted(key)},"data":{data},'
        f'"headers":{headers},"recorded_at":"{recorded_at}"'
    )


_STORED = re.compile(
    rb'\{"id":"([0-9A-Z]+)","position":(\d+),'
    rb'"type":("(?:[^"\\]|\\.)*"),"key":("(?:[^"\\]|\\.)*"),'
)


class RecordHead(Struct, frozen=True):
    """What places and filters a record."""

    id: str
    position: int
    type: str
    key: str


_head_decoder = msgspec.json.Decoder(RecordHead)


def record_head(raw: Raw) -> RecordHead:
    """Return the first fields of a record's JSON as this module makes it, whatever follows them.

    The data may be nested too deeply for a parser even to pass over it.
    """
    try:
        return _head_decoder.decode(raw)
    except RecursionError:
        match = _STORED.match(memoryview(raw))
        if match is None:
            raise
        fields = b'{"id":"%b","position":%b,"type":%b,"key":%b}' % match.groups()
        return _head_decoder.decode(fields)


def _quoted(text: str) -> str:
    return _encoder.encode(text).decode()


def decode(text: str | bytes) -> list[ClientFrame]:
    """Return the frames of a client's message; raise `BadFrame`."""
    try:
        frames = _decoder.decode(text)
    except msgspec.ValidationError as error:
        raise BadFrame(f"That is no frame: {error}.") from None
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise BadFrame("That is no JSON.") from None
    return frames if isinstance(frames, list) else [frames]
