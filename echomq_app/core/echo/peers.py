"""What a node knows of the others as those that it sends to, and of lives that are over."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict

from .frames import Gone

QUIET_BEATS = 2.5
"""Heartbeats without a word after which a node may be away."""
_REMEMBERED = 1000


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


class Lives:
    """Lives of nodes that are over, or seem to be: what still comes of them means nothing.

    `grace`: seconds in which the last words of a replaced life may still be under way.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._ended: OrderedDict[str, tuple[str, list[int], float]] = OrderedDict()
        self._replaced: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._shared_names: set[str] = set()

    def end(self, boot: str, name: str, cursors: list[int], at: float) -> None:
        """Note that a life has said goodbye, having written that much."""
        self._ended[boot] = (name, cursors, at)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def ended_since(self, since: float, now: float) -> list[Gone]:
        """Return the lives that wrote something and have said goodbye since then."""
        return [
            (boot, name, cursors, now - at)
            for boot, (name, cursors, at) in self._ended.items()
            if at >= since and any(cursors)
        ]

    def has_ended(self, boot: str) -> bool:
        """Tell whether this life has said goodbye."""
        return boot in self._ended

    def replace(self, boot: str, name: str, now: float) -> None:
        """Note that another life of the node has begun."""
        self._replaced[boot] = (name, now)
        if len(self._replaced) > _REMEMBERED:
            self._replaced.popitem(last=False)

    def is_replaced(self, boot: str) -> bool:
        """Tell whether another life has taken its place."""
        return boot in self._replaced

    def speaks(self, boot: str, now: float) -> bool:
        """Tell a last word of a replaced life from a second node with the same name.

        From then on neither of the two replaces the other.
        """
        name, since = self._replaced[boot]
        if now - since < self._grace:
            return False
        del self._replaced[boot]
        self._shared_names.add(name)
        return True

    def is_shared(self, name: str) -> bool:
        """Tell whether two living nodes have this name."""
        return name in self._shared_names
