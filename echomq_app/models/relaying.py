"""Relay: move a stream's committed records from the outbox into the stream.

What was moved is dead, but stays in the outbox's index as long as any snapshot is open that is
older (pg_dump's, a forgotten transaction's): a relay from the front has to pass every such entry,
and gets slower without end. So who relays a stream again and again remembers a floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from django.db import connections
from django.db.models.functions import Length

from ..core.floor import Floor
from ..core.ids import JobId
from ..core.pace import Pace
from .stream import Outbox
from .transactions import as_statement, naming_isolation

FRONT_INTERVAL = 10.0
"""Seconds after which it looks from the front again: rows that others wrote, without the order
that the floor relies on, come late then but aren't lost."""
FRONT_SHARE = 0.02
"""Of the time, at most: the front is what gets slow."""

KEYS = 40
"""Jobs that share a row of the outbox, at most: the row stays below 2 kB, above which PostgreSQL
compresses it and moves parts elsewhere."""

_RELAY = "SELECT moved, last_id, xact, oldest_xact FROM echomq_relay_from_v1(%s, %s, %s)"


def count_waiting(using: str, most: int) -> int:
    """Count the records in the outbox, and not many more than `most`."""
    keys = Outbox.objects.using(using).values_list(Length("keys"), flat=True)[:most]
    one = len(f"{JobId.from_int(0)},")
    return sum(1 if length is None else (length + 1) // one for length in keys)


class Relay:
    """Moves the records of one stream. One thread at a time."""

    def __init__(
        self, using: str, stream: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = stream
        self._using = using
        self._clock = clock
        self._floor = Floor()
        self._front = Pace(FRONT_SHARE, clock=clock)

    def __str__(self) -> str:
        return self.stream

    @property
    def floor(self) -> int:
        """The outbox's id from which on it looks."""
        return self._floor.value

    def move(self, at_most: int) -> int | None:
        """Move up to so many, or the first row of the outbox; the oldest first; return how many.

        `None`: somebody else holds the stream's lock. Not inside a transaction.
        """
        connection = connections[self._using]
        if connection.vendor == "sqlite":
            return 0  # there is no outbox
        from_front, begun = self._front.due(), self._clock()
        if from_front:
            self._floor = Floor()

        def call() -> int | None:
            with naming_isolation(self.stream), connection.cursor() as cursor:
                cursor.execute(_RELAY, (self.stream, at_most, self._floor.value))
                moved, last, transaction, oldest = cursor.fetchone()
            if from_front:
                self._front.took(self._clock() - begun, least=FRONT_INTERVAL)
            if moved is not None:
                self._floor.took(last, transaction, oldest)
            return None if moved is None else int(moved)

        return as_statement(self._using, call)
