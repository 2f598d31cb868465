"""What nodes of the channel layer say to each other, and how it is written down.

A frame is one byte with the wire version and a MessagePack array. A version that we can't
read is refused with `FrameRefused` and stays unacked, so its records remain in the
sender's buffer until both sides understand each other, in a rolling deploy for example.
"""

from __future__ import annotations

import msgspec

VERSION = 1
READABLE = frozenset({1})

Record = tuple[str, bytes]
"""A message on its way: the group, and the message encoded."""

Gone = tuple[str, str, list[int], float]
"""A node that has said bye: its boot, its name, its last write cursors, and how many
seconds ago that was."""


Lost = tuple[str, str, float]
"""A node that fell silent without a bye: its boot, its name, and how many seconds ago it was
given up."""


class FrameRefused(Exception):
    """Bytes that are no frame, or one of a version that we can't read."""


class Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`boot` is the life of the node that speaks: a new one for every start and fork."""

    boot: str


class Hello(Frame, frozen=True, array_like=True, tag="h"):
    """I am here. Sent to all at the start and at every heartbeat, and to one as an answer."""

    name: str
    control: str
    """Where to send hello, ack and bye."""
    data: str
    """Where to send batches."""
    writing: float
    """Seconds since its first write; -1 before that."""
    clock: float
    """Its wall clock, to find clocks that differ. Nothing else is decided by it."""
    cursors: list[int]
    """The write cursors of its producers, by index."""
    expected: dict[str, dict[int, int]]
    """What it needs next from each boot that it knows, by the producer's index."""
    gone: list[Gone]
    """Who said bye to it lately: another node may have missed all of somebody's short life."""
    lost: list[Lost]
    """Whom it has given up lately."""
    age: float
    """Seconds since its life began, also those in which it was stopped."""
    since: float
    """The age from which on `gone` and `lost` are complete."""
    asks: float = -1.0
    """The age of the receiver since which this node wants to be told who has gone, in a
    hello in return, at once (a ping too); negative: it wants none."""


class Batch(Frame, frozen=True, array_like=True, tag="b"):
    """Records of producer `index` from position `base` on.

    A base beyond what the receiver expects is the notice: what is between is gone. So
    the notice can't come apart from the records that follow it.
    """

    name: str
    control: str
    index: int
    base: int
    records: list[Record]


class Ack(Frame, frozen=True, array_like=True, tag="a"):
    """I have delivered everything of producer `index` of `to` before `cursor`."""

    to: str
    index: int
    cursor: int


class Bye(Frame, frozen=True, array_like=True, tag="z"):
    """I leave on purpose, and these were my last write cursors."""

    name: str
    cursors: list[int]


class Direct(Frame, frozen=True, array_like=True, tag="d"):
    """A plain `send` to a channel of the receiving node: at most once."""

    channel: str
    message: bytes


AnyFrame = Hello | Batch | Ack | Bye | Direct

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyFrame)


def encode(frame: AnyFrame) -> bytes:
    """Return the frame's bytes."""
    return bytes((VERSION,)) + _encoder.encode(frame)


def decode(wire: bytes) -> AnyFrame:
    """Return the frame; raise `FrameRefused` for anything that isn't one."""
    if not wire or wire[0] not in READABLE:
        version = wire[0] if wire else "none"
        raise FrameRefused(
            f"a frame of version {version}; this node reads {sorted(READABLE)}. During a rolling "
            "deploy this ends by itself; otherwise install one version everywhere."
        )
    try:
        return _decoder.decode(memoryview(wire)[1:])
    except msgspec.MsgspecError as error:
        raise FrameRefused(f"a frame that can't be read: {error}") from None
