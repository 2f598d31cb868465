"""How queues share a worker: by their weights, and nobody's share is wasted."""

from __future__ import annotations

from collections.abc import Mapping


class Shares:
    """Weighted turns of queues: over time each is first as often as its weight says.

    (The smooth weighted round robin of nginx: every round each queue is credited its weight,
    and the richest pays for being first with the sum of all.)
    """

    def __init__(self, weights: Mapping[str, int]) -> None:
        self._weights = dict(weights)
        self._total = sum(self._weights.values())
        self._credit = dict.fromkeys(self._weights, 0)

    def turn(self, room: int) -> list[tuple[str, int]]:
        """Return the queues in the order of this turn, each with its part of `room`.

        Parts are rounded up, so with little room the order alone decides. What a queue
        doesn't use is for the others.
        """
        for queue, weight in self._weights.items():
            self._credit[queue] += weight
        order = sorted(self._weights, key=lambda queue: -self._credit[queue])
        self._credit[order[0]] -= self._total
        return [(queue, -(-room * self._weights[queue] // self._total)) for queue in order]
