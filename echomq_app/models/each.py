"""The same work for each of many, where one that fails must not stop the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from django.db import DatabaseError, OperationalError, connections

from ..core.retry import ceiling
from ..exceptions import DatabaseLocked
from .transactions import in_transaction

logger = logging.getLogger("echomq")

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

SHORTEST_REST = 0.05
LONGEST_REST = 5.0
"""Seconds for which one that failed is left alone, when the same is done again and again."""


class Failure(NamedTuple, Generic[T]):
    """One for which the work failed, and why."""

    item: T
    error: Exception


def for_each(
    using: str,
    items: Sequence[T],
    work: Callable[[Sequence[T]], object],
    *,
    doing: str,
    together: int = 1,
) -> list[Failure[T]]:
    """Do some work for each item; return those for which it failed, each with a line in the log.

    `work` gets up to `together` items at once, and where that fails, each of them alone: what
    it does for them is one transaction, or harmless when repeated. It raises what leaves nothing
    to go on with: a lost connection, an error inside the caller's transaction, or SQLite's lock.
    """
    failures: list[Failure[T]] = []
    for start in range(0, len(items), together):
        some = items[start : start + together]
        if len(some) > 1:
            try:
                work(some)
                continue
            except Exception as error:  # noqa: BLE001  (each of them alone says what it is)
                raise_if_over(using, error)
        for item in some:
            try:
                work([item])
            except Exception as error:
                raise_if_over(using, error)
                failures.append(Failure(item, error))
                logger.error(
                    "event=failed doing=%s item=%s error=%r",
                    doing,
                    item,
                    str(error).strip() or type(error).__name__,
                    exc_info=None if isinstance(error, DatabaseError) else error,
                )
    return failures


class Rests(Generic[H]):
    """The same work for each of many, again and again. One that fails rests, longer each time.

    Otherwise it would fail as often as there is work for the others. One thread at a time.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: dict[H, tuple[int, float]] = {}
        """How often in a row, and until when it rests."""

    def for_each(
        self,
        using: str,
        items: Sequence[H],
        work: Callable[[Sequence[H]], object],
        *,
        doing: str,
        together: int = 1,
    ) -> bool:
        """Do as `for_each` for those that don't rest; tell whether none failed."""
        now = self._clock()
        awake = [one for one in items if one not in self._failed or self._failed[one][1] <= now]
        failed = {one for one, _ in for_each(using, awake, work, doing=doing, together=together)}
        for one in awake:
            times, _ = self._failed.pop(one, (0, now))
            if one in failed:
                rest = ceiling(times + 1, base=SHORTEST_REST, cap=LONGEST_REST)
                self._failed[one] = times + 1, self._clock() + rest
        return not failed

    def pause(self, at_most: float) -> float:
        """Return the seconds after which one that rests may be tried, or `at_most`."""
        now = self._clock()
        ends = [until - now for _, until in self._failed.values() if until > now]
        return min([at_most, *ends])


def raise_if_over(using: str, error: Exception) -> None:
    """Raise the error again if the connection takes no more statements.

    Or if it is SQLite and locked: all the others would wait as long for its one writer.
    """
    connection = connections[using]
    if isinstance(error, DatabaseLocked) or (
        connection.vendor == "sqlite"
        and isinstance(error, OperationalError)
        and "is locked" in str(error)
    ):
        raise error
    if in_transaction(connection) or not (connection.connection and connection.is_usable()):
        raise error
