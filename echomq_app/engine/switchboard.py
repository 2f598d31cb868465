"""Who in this process wants to hear which group.

Feeds and waiters plug in here; whatever brings a message (a broker, or a publisher in
this process) delivers it here. A delivery reads one immutable tuple, so it takes no
lock and a sink may come or go meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any, Protocol

logger = logging.getLogger("echomq")

Message = Mapping[str, Any]


class Sink(Protocol):
    """What takes messages. Called from any thread: don't block, don't raise."""

    def deliver(self, message: Message) -> None:
        """Take a message of a group that this sink was added to."""

    def gap(self, reason: str) -> None:
        """Hear that messages may be missing from here on back."""


class Switchboard:
    """The sinks of this process, by group."""

    def __init__(self) -> None:
        self._sinks: dict[str, tuple[Sink, ...]] = {}
        self._failed: set[int] = set()
        """The ids of the sinks that have raised: each is logged once."""
        self._lock = threading.Lock()

    def add(self, group: str, sink: Sink) -> None:
        """Deliver the group's messages to `sink` from now on; adding twice is once."""
        with self._lock:
            there = self._sinks.get(group, ())
            if sink not in there:
                self._sinks[group] = (*there, sink)

    def remove(self, group: str, sink: Sink) -> None:
        """Deliver no more; a delivery that another thread has begun may still arrive."""
        with self._lock:
            left = tuple(other for other in self._sinks.get(group, ()) if other is not sink)
            if left:
                self._sinks[group] = left
            else:
                self._sinks.pop(group, None)
            self._failed.discard(id(sink))

    def groups(self) -> set[str]:
        """Return the groups that somebody wants."""
        with self._lock:
            return set(self._sinks)

    def wants(self, group: str) -> bool:
        """Tell whether somebody wants this group."""
        return group in self._sinks

    def deliver(self, group: str, message: Message) -> int:
        """Hand a message to the group's sinks; return how many there are."""
        sinks = self._sinks.get(group, ())
        for sink in sinks:
            try:
                sink.deliver(message)
            except Exception as error:  # noqa: BLE001  (the others have to hear)
                self._failure(sink, error)
        return len(sinks)

    def gap(self, reason: str, group: str | None = None) -> None:
        """Tell the sinks of a group, or all, that messages may be missing."""
        with self._lock:
            wanted = [group] if group is not None else list(self._sinks)
            # A sink of several groups hears of it once.
            sinks = {id(sink): sink for name in wanted for sink in self._sinks.get(name, ())}
        for sink in sinks.values():
            try:
                sink.gap(reason)
            except Exception as error:  # noqa: BLE001  (as above)
                self._failure(sink, error)

    def _failure(self, sink: Sink, error: Exception) -> None:
        """Log what a sink raised, the first time."""
        if id(sink) not in self._failed:
            self._failed.add(id(sink))
            logger.error("event=sink_failed sink=%r", sink, exc_info=error)

    def after_fork_in_child(self) -> None:
        """Forget all sinks: they belong to the parent's threads and loops."""
        self._lock = threading.Lock()
        self._sinks = {}
        self._failed = set()
