"""The receiving half, which owns the guarantee.

A producer may forget, restart, or be wrong; the receiver keeps one integer for each
(boot, index), the position that it expects next, and judges every frame by it:

    base == expected   deliver
    base <  expected   a repeat: drop the overlap, deliver the rest
    base >  expected   a hole: the notice first, then the records

So there is no window of seen ids to size, and a batch that was sent twice reaches a
subscriber once.

A producer that we meet for the first time is different from one that we have lost. If
all it ever wrote was written while we were listening, it starts at 0 and nobody has
missed anything (a command that sends one message and exits). Otherwise we begin at its
write cursor, and those who joined a group here before are told, since it may have
written something meanwhile; nobody has joined yet when a node has just started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from .frames import Record


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Subscribers here have missed messages of the node `node`; 0: nobody knows how many."""

    node: str
    missed: int


@dataclasses.dataclass(slots=True)
class Source:
    """What we know of one life of another node, as a producer."""

    name: str
    expected: dict[int, int]
    heard: float
    """When anything of it came last."""
    stalled: dict[int, tuple[int, float]] = dataclasses.field(default_factory=dict)
    """By index: a write cursor that we haven't reached, and since when nothing moved."""
    told: bool = False
    """It vanished without a bye, and our subscribers know."""
    replaced: bool = False
    """A new life of the node has begun."""
    witnessed: float | None = None
    """The age of it until which we know all that it knows of who has gone."""


class Receiver:
    """What this node expects from every producer of every other node.

    `age` gives the seconds since it began to listen. `remembered`: how many boots it
    keeps at most.
    """

    def __init__(self, age: Callable[[], float], *, remembered: int = 10_000) -> None:
        self.sources: dict[str, Source] = {}
        self._age = age
        self._since = 0.0
        self._remembered = remembered

    def expected(self, since: float) -> dict[str, dict[int, int]]:
        """Return what is needed next, of those heard at `since` or later, for a hello."""
        return {
            boot: dict(source.expected)
            for boot, source in self.sources.items()
            if source.heard >= since
        }

    def meet(
        self, boot: str, name: str, cursors: Sequence[int], writing: float, now: float
    ) -> Notice | None:
        """Hear a hello: begin with a producer that is new, watch one that isn't."""
        source = self.sources.get(boot)
        if source is not None:
            source.heard = now
            source.told = source.replaced = False
            self._watch(source, cursors, now)
            return None
        from_the_start = self._age() - self._since >= writing
        start = [0] * len(cursors) if from_the_start else cursors
        self._remember(boot, Source(name, dict(enumerate(start)), now))
        return Notice(node=name, missed=0) if any(start) else None

    def take(
        self, boot: str, name: str, index: int, base: int, records: Sequence[Record], now: float
    ) -> tuple[Notice | None, Sequence[Record], int]:
        """Judge a batch: the notice to give first, the records to deliver, the ack's cursor."""
        source = self.sources.get(boot)
        if source is None:
            source = Source(name, {}, now)
            self._remember(boot, source)
        source.heard = now
        source.told = False
        expected = source.expected.get(index, 0)
        notice = Notice(node=source.name, missed=base - expected) if base > expected else None
        fresh = records[max(0, expected - base) :]
        cursor = max(expected, base + len(records))
        source.expected[index] = cursor
        if cursor > expected:
            source.stalled.pop(index, None)
        return notice, fresh, cursor

    def leave(self, boot: str, name: str, cursors: Sequence[int]) -> Notice | None:
        """Hear a bye: nothing is to be told if we have all of it.

        Of one that we never met we have nothing.
        """
        source = self.sources.pop(boot, None)
        expected = {} if source is None else source.expected
        missed = sum(
            max(0, cursor - expected.get(index, 0)) for index, cursor in enumerate(cursors)
        )
        return Notice(node=name, missed=missed) if missed else None

    def replaced(self, boot: str) -> Notice | None:
        """Hear that a node has started anew without a bye: its old life may owe us something.

        Those who joined after it vanished haven't heard of that, so they are told now. What
        we expect of the old life is kept: it might still speak.
        """
        source = self.sources.get(boot)
        if source is None or source.replaced:
            return None
        source.told = source.replaced = True
        return Notice(node=source.name, missed=0)

    def vanished(self, now: float, patience: float) -> dict[str, Notice]:
        """Give up, once each, on nodes that have been silent for `patience` seconds.

        They said no bye, so they may have died with something that nobody else has.
        """
        notices = {}
        for boot, source in self.sources.items():
            if not source.told and now - source.heard >= patience:
                source.told = True
                notices[boot] = Notice(node=source.name, missed=0)
        return notices

    def watches(self, boot: str) -> bool:
        """Tell whether we would notice ourselves that this life has vanished."""
        source = self.sources.get(boot)
        return source is not None and not source.told

    def witness(self, boot: str, age: float, since: float) -> float | None:
        """Hear who has gone from a node that was `age` old, complete from `since` on.

        Returns since when we should ask it, if there is a hole before that: we were out of
        each other's hearing for longer than its hello reaches back.
        """
        source = self.sources[boot]
        if source.witnessed is None:  # What was before our own time is nothing to us.
            source.witnessed = max(0.0, age - self._age())
        if since > source.witnessed:
            return source.witnessed
        source.witnessed = max(source.witnessed, age)
        return None

    def overdue(self, now: float, patience: float) -> list[Notice]:
        """Give up on what producers wrote and never brought, `patience` seconds after."""
        notices = []
        for source in self.sources.values():
            for index, (cursor, since) in list(source.stalled.items()):
                if now - since < patience:
                    continue
                del source.stalled[index]
                missed = cursor - source.expected.get(index, 0)
                source.expected[index] = cursor
                notices.append(Notice(node=source.name, missed=missed))
        return notices

    def _watch(self, source: Source, cursors: Sequence[int], now: float) -> None:
        for index, cursor in enumerate(cursors):
            if cursor > source.expected.get(index, 0):
                source.stalled.setdefault(index, (cursor, now))

    def _remember(self, boot: str, source: Source) -> None:
        if len(self.sources) >= self._remembered:
            oldest = min(self.sources, key=lambda other: self.sources[other].heard)
            del self.sources[oldest]
            # From here on we can't tell a new producer from that one.
            self._since = self._age()
        self.sources[boot] = source
