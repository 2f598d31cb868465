"""Lives of nodes that are over: what is remembered of them, and for whom.

Another node may have missed all of somebody's short life: it came, sent, and left or died
while their link was down, and neither knew of the other. So every hello tells who has
gone lately; what that means for its subscribers, each node decides for itself.
"""

from __future__ import annotations

from collections import OrderedDict

from .frames import Gone, Lost

_REMEMBERED = 1000
"""Lives of each kind. Of more, in the time of one partition, nobody tells."""


class Lives:
    """Lives of nodes that are over, or seem to be. Times are of this node's `age`.

    `grace`: seconds in which the last words of a replaced life may still be under way.
    `patience`: seconds of silence after which a life is given up.
    """

    def __init__(self, grace: float, patience: float) -> None:
        self._grace = grace
        self._patience = patience
        self._ended: OrderedDict[str, tuple[str, list[int], float]] = OrderedDict()
        self._lost: OrderedDict[str, tuple[str, float]] = OrderedDict()
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

    def lose(self, boot: str, name: str, at: float) -> None:
        """Note that a life was given up: it fell silent without a goodbye."""
        self._lost[boot] = (name, at)
        self._lost.move_to_end(boot)
        if len(self._lost) > _REMEMBERED:
            self._lost.popitem(last=False)

    def lost_since(self, since: float, now: float) -> list[Lost]:
        """Return the lives that were given up since then."""
        return [(boot, name, now - at) for boot, (name, at) in self._lost.items() if at >= since]

    def is_news(self, boot: str, at: float) -> bool:
        """Tell another node's giving up at that time from one that we know of.

        A life that was given up too soon may speak to somebody once more, and is given up
        again, at least a patience later. What is nearer is the same one, by another clock.
        """
        known = self._lost.get(boot)
        return not self.has_ended(boot) and (known is None or at > known[1] + self._patience / 2)

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
