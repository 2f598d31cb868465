"""What the log should do, as a list."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record."""

    n: int
    type: str
    key: str
    idempotency_key: str


@dataclasses.dataclass(slots=True)
class Life:
    """A stream from its first append to its deletion. A position is an index of `entries`."""

    entries: list[Entry] = dataclasses.field(default_factory=list)
    first: int = 0
    """Oldest retained position."""

    @property
    def retained(self) -> list[Entry]:
        return self.entries[self.first :]

    def append(self, record: dict[str, Any]) -> tuple[int, bool]:
        """Append, unless the key is known; return the position and whether it was."""
        once = record["idempotency_key"]
        for position, entry in enumerate(self.retained, start=self.first):
            if once and entry.idempotency_key == once:
                return position, True
        self.entries.append(
            Entry(
                n=record["data"]["n"],
                type=record["type"],
                key=record["key"],
                idempotency_key=once,
            )
        )
        return len(self.entries) - 1, False
