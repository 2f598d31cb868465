"""From which id on a queue of committed rows has to be read, when what was taken stays dead in it.

Rows get their ids in the order of their inserts and become visible in the order of their commits:
one with a low id may come late, and must not be overtaken by what its own commit made possible.
So a reader may begin after an id only when every transaction that can have drawn a lower one has
ended, and what they left has been taken.

Who inserts has a transaction number before it draws an id (see `models/plpgsql/outbox_v1.sql`).
Whoever has drawn one by the time of a reading has a number below that of any transaction
which begins after it, such as the reader's next.
"""

from __future__ import annotations

import dataclasses

MOST = 64
"""Places that are remembered: a transaction may stay open for hours."""


@dataclasses.dataclass(slots=True)
class _Place:
    id: int
    transaction: int
    """In which it was read."""
    before: int | None = None
    """Whoever may have drawn a lower id has a lower transaction number than this."""


class Floor:
    """`value`: read what has a greater id."""

    __slots__ = ("_places", "value")

    def __init__(self) -> None:
        self.value = 0
        self._places: list[_Place] = []

    def took(self, last: int | None, transaction: int | None, oldest: int) -> None:
        """Learn from a reading that began at the floor, in ascending order, and took what it read.

        `last`: the last id that it took; None: there was nothing. `transaction`: its own
        number, None if it has none. `oldest`: of those that were open when it began to read,
        the lowest number; all below have ended.
        """
        if transaction is not None:
            for place in self._places:
                if place.before is None and transaction > place.transaction:
                    place.before = transaction
        while self._places and self._is_safe(self._places[0], last, oldest):
            self.value = self._places.pop(0).id
        if last is not None and transaction is not None:
            del self._places[MOST - 1 :]
            self._places.append(_Place(last, transaction))

    @staticmethod
    def _is_safe(place: _Place, last: int | None, oldest: int) -> bool:
        ended = place.before is not None and place.before <= oldest
        return ended and (last is None or last >= place.id)
