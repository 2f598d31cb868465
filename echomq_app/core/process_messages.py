"""What a worker and a process that runs handlers for it tell each other.

    worker -> process    Run, Cancel
    process -> worker    Ready or Unready, then for each Run: Begun, Progress, Ended

`number` says which attempt is meant: a Cancel that comes when the handler has just ended,
and the next has begun, must not hit that one. There are no exceptions and no pickles in
it: what a handler raises travels as text.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec


class Run(msgspec.Struct, tag=True, frozen=True):
    """Run the handler of a claimed job: JSON text, see `jobs/process_claim.py`."""

    number: int
    job: str


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Cancel the handler's token. `who` is the value of an `Asked`."""

    number: int
    who: str
    reason: str | None
    kind: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Django is set up."""


class Unready(msgspec.Struct, tag=True, frozen=True):
    """It couldn't be, and the process ends. `text`: the last line of the traceback."""

    text: str


class Begun(msgspec.Struct, tag=True, frozen=True):
    """The handler of a Run begins."""

    number: int


class Progress(msgspec.Struct, tag=True, frozen=True):
    """What the handler reported last."""

    number: int
    fraction: float
    note: str


class Ended(msgspec.Struct, tag=True, frozen=True):
    """How the attempt ended: fields of an `Outcome`, `ending` by its name."""

    number: int
    ending: str
    result: str | None = None
    error: dict[str, Any] | None = None
    reason: str | None = None
    kind: str = ""
    progress: tuple[float, str] | None = None
    memory: int = 0
    """What the process holds now, in bytes."""


Order: TypeAlias = Run | Cancel
Report: TypeAlias = Ready | Unready | Begun | Progress | Ended

_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def encode(message: Order | Report) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def decode_order(data: bytes) -> Order:
    """Read what the worker sent."""
    return _orders.decode(data)


def decode_report(data: bytes) -> Report:
    """Read what the process sent."""
    return _reports.decode(data)
