"""Database connections of the worker itself, apart from those of its handlers.

Each of the worker's own threads has one private connection: outside the project's pool,
whose four connections the handlers may hold while the lease has to be renewed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

from django.db import InterfaceError, OperationalError, connections, transaction

from ..exceptions import DatabaseLocked
from ..models.private_connection import private_connection
from .wakeup import Wakeup
from .watchdog import Watch, watchdog

logger = logging.getLogger("echomq.jobs")

_FIRST_PAUSE = 0.05
LONGEST_PAUSE = 5.0
TRANSIENT = (OperationalError, InterfaceError, DatabaseLocked)
"""What a moment later may go well: no connection, a lock, a deadlock, a full pool."""

_PLAIN = "_echomq_read_committed"
_thread = threading.local()

T = TypeVar("T")


@contextmanager
def service_connection(
    using: str,
    purpose: str,
    wakeup: Wakeup,
    *,
    patience: float,
    longest_pause: float = LONGEST_PAUSE,
) -> Iterator[Persistent]:
    """Give this thread a connection of its own for `using`, and close it at the end.

    `purpose` stands in PostgreSQL's `application_name`. Database work of the thread goes
    through the `Persistent` that it gets; `wakeup` is what ends the thread. A piece of
    work that gets no answer for `patience` seconds has its connection cut.
    """
    watch = Watch(purpose, patience)
    with private_connection(using, purpose):
        watchdog.add(watch)
        _thread.serves = True
        try:
            yield Persistent(using, wakeup, watch, longest_pause)
        finally:
            _thread.serves = False
            watchdog.remove(watch)


def in_service_thread() -> bool:
    """Return whether this thread has a `service_connection`: a project's code can't run here."""
    return getattr(_thread, "serves", False)


def read_committed(using: str) -> AbstractContextManager[Any]:
    """Make one statement READ COMMITTED: a transaction, where the server's default is higher.

    (The connection's own isolation level holds in transactions only.)
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        return nullcontext()
    plain = getattr(connection, _PLAIN, None)
    if plain is None:
        with connection.cursor() as cursor:
            cursor.execute("SHOW default_transaction_isolation")
            plain = cursor.fetchone()[0] == "read committed"
        setattr(connection, _PLAIN, plain)
    return nullcontext() if plain else transaction.atomic(using=using)


def open_transactions() -> list[str]:
    """Return the aliases of this thread's connections that are in an `atomic()`."""
    every = connections.all(initialized_only=True)
    return [connection.alias for connection in every if connection.in_atomic_block]


def drop_open_transactions() -> None:
    """Close this thread's connections that are still in an `atomic()`.

    Django closes none there. Whoever used the thread next would work in that transaction, and
    nobody would commit it.
    """
    for alias in open_transactions():
        connections[alias].close()
        del connections[alias]  # this one stays in its transaction for good


class Persistent:
    """Runs database work that has to succeed some time: again and again, with pauses.

    One per thread, from `service_connection`. A pause ends early when `wakeup` is closed.
    """

    def __init__(self, using: str, wakeup: Wakeup, watch: Watch, longest_pause: float) -> None:
        self._using = using
        self._wakeup = wakeup
        self._watch = watch
        self._longest_pause = longest_pause
        self._failures = 0

    def attempt(
        self, what: str, call: Callable[[], T], default: T, *, may_take_long: bool = False
    ) -> T:
        """Run `call` once. On an error, log it, drop the connection, and pause.

        Returns `default` then: the caller's loop comes round again. What may take long
        isn't watched.
        """
        if not may_take_long:
            self._watch.begin(connections[self._using])
        try:
            result = call()
        except Exception as error:  # noqa: BLE001  (the loop goes on, and says what it met)
            self._watch.end(well=False)
            self._failed(what, error)
            return default
        self._watch.end(well=True)
        self._failures = 0
        return result

    def _failed(self, what: str, error: Exception) -> None:
        self._failures += 1
        pause = min(self._longest_pause, _FIRST_PAUSE * 2 ** min(self._failures - 1, 10))
        expected = isinstance(error, TRANSIENT)
        logger.log(
            logging.WARNING if expected else logging.ERROR,
            "event=worker_error thread=%s doing=%s failures=%d pause=%.2f error=%r",
            threading.current_thread().name,
            what,
            self._failures,
            pause,
            str(error).strip().partition("\n")[0] or type(error).__name__,
            exc_info=None if expected else error,
        )
        connections[self._using].close()
        self._wakeup.pause(pause)
