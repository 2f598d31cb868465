"""What a stream and a queue may be called, and the group names made of them.

Names travel through SQL, URLs, file names and Channels' group names (ASCII
letters, digits, `-`, `_`, `.`, under 100 characters, no colon): one rule fits all.
"""

from __future__ import annotations

import re

from ..exceptions import InvalidName

STREAM_NAME_MAX = 75
QUEUE_NAME_MAX = 70
TYPE_MAX = 100
KEY_MAX = 255
IDEMPOTENCY_KEY_MAX = 255

RESERVED_PREFIX = "emq."
"""Streams that the app writes itself: `emq.<queue>`."""
RESERVED_SUFFIX = ".dead"
"""Streams of parked records: `<stream>.dead`."""

_NAME = re.compile(r"[A-Za-z0-9._-]+\Z")


def check_stream_name(name: str) -> str:
    """Return `name` if a stream may be called so; raise `InvalidName`."""
    return _check(name, "stream", STREAM_NAME_MAX)


def check_queue_name(name: str) -> str:
    """Return `name` if a queue may be called so; raise `InvalidName`."""
    _check(name, "queue", QUEUE_NAME_MAX)
    if name.endswith(RESERVED_SUFFIX):
        raise InvalidName(
            f"A queue name doesn't end with '.dead', as {name!r} does: its stream would have the "
            "name that is reserved for parked records of another one."
        )
    return name


def is_reserved(name: str) -> bool:
    """Tell whether only the app itself writes the stream of this name."""
    return name.startswith(RESERVED_PREFIX) or name.endswith(RESERVED_SUFFIX)


def queue_stream(queue: str) -> str:
    """Name the stream that remembers every transition of a queue's jobs."""
    return f"{RESERVED_PREFIX}{queue}"


def events_group(queue: str) -> str:
    """Name the channel-layer group of a queue's lossy feed."""
    return f"emq.q.{queue}.events"


def stream_wake_group(stream: str) -> str:
    """Name the group that carries "there is something new" for a stream."""
    return f"emq.s.{stream}"


def queue_wake_group(queue: str) -> str:
    """Name the group that carries "there is work, or a cancel" for a queue."""
    return f"emq.w.{queue}"


def _check(name: str, kind: str, longest: int) -> str:
    if not isinstance(name, str):
        raise InvalidName(f"A {kind} name is a str, not {type(name).__name__}.")
    if not 1 <= len(name) <= longest:
        raise InvalidName(
            f"A {kind} name has 1 to {longest} characters, {name[:90]!r} has {len(name)}."
        )
    if not _NAME.match(name):
        raise InvalidName(
            f"A {kind} name is made of ASCII letters, digits, '.', '_' and '-'; "
            f"{name!r} has something else."
        )
    return name
