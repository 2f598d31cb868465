"""The same work for each of many, where one that fails must not stop the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from django.db import DatabaseError, connections

from .transactions import in_transaction

logger = logging.getLogger("echomq")

T = TypeVar("T")


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
    to go on with: a lost connection, or an error inside the caller's transaction.
    """
    failures: list[Failure[T]] = []
    for start in range(0, len(items), together):
        some = items[start : start + together]
        if len(some) > 1:
            try:
                work(some)
                continue
            except Exception:  # noqa: BLE001  (each of them alone says what it is)
                _raise_if_over(using)
        for item in some:
            try:
                work([item])
            except Exception as error:
                _raise_if_over(using)
                failures.append(Failure(item, error))
                logger.error(
                    "event=failed doing=%s item=%s error=%r",
                    doing,
                    item,
                    str(error).strip() or type(error).__name__,
                    exc_info=None if isinstance(error, DatabaseError) else error,
                )
    return failures


def _raise_if_over(using: str) -> None:
    """Raise the error at hand again if the connection takes no more statements."""
    connection = connections[using]
    if in_transaction(connection) or not (connection.connection and connection.is_usable()):
        raise  # noqa: PLE0704  (called while it is handled)
