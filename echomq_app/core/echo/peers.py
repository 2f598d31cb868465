"""What a node knows of the others as those that it sends to."""

from __future__ import annotations

import dataclasses

QUIET_BEATS = 2.5
"""Heartbeats without a word after which a node may be away."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers that the protocol goes by; times in seconds."""

    pool_size: int = 1
    buffer_size: int = 10_000
    max_batch: int = 500
    call_timeout: float = 5.0
    retry_interval: float = 0.2
    heartbeat_interval: float = 5.0
    forget_after: float = 60.0
    concurrent_flush: bool = True


@dataclasses.dataclass(slots=True)
class Peer:
    """Another node, as far as sending to it goes."""

    name: str
    control: str
    data: str
    heard: float
    awaiting: dict[int, float] = dataclasses.field(default_factory=dict)
    """By producer index: until when the ack of the frame in flight may take."""
    suspect: bool = False
    """A frame wasn't acked: it is pinged, and gets no batch until it says something."""
    failures: int = 0
    ping_at: float = 0.0
    served: float = 0.0
    """When the last batch was sent, to take turns where only one frame may be in flight."""
