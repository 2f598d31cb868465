"""What the surrounding transaction allows, asked in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from django.db import DatabaseError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..core.hint import Hint
from ..exceptions import InsideTransaction, IsolationError

_WRONG_ISOLATION = "EQ001"
_READ_ONLY = "25006"
_IN_ERROR = 3
"""PQTRANS_INERROR of libpq."""
_HIGHER = "_echomq_higher_isolation"

T = TypeVar("T")


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether a caller's transaction is open (or will be, without autocommit)."""
    return connection.in_atomic_block or not connection.get_autocommit()


def is_aborted(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether the caller's transaction can only be rolled back, after an error in it."""
    if not connection.in_atomic_block or connection.needs_rollback:
        return connection.in_atomic_block
    if connection.vendor != "postgresql":
        return not connection.connection.in_transaction
    return bool(connection.connection.info.transaction_status == _IN_ERROR)


def refuse_transaction(using: str, call: str, instead: str) -> None:
    """Raise `InsideTransaction` when `call` would run inside a caller's transaction."""
    if in_transaction(connections[using]):
        raise InsideTransaction(
            f"{call} can't run inside a transaction: it has to see what others commit. {instead}"
        )


def after_commit(using: str, hint: Callable[[], None]) -> None:
    """Run a hint once the transaction has committed, at once where there is none.

    Without autocommit Django has no such moment: the hint runs now. A hint that comes
    too early costs a look, one that never comes would cost a poll.
    """
    connection = connections[using]
    if connection.in_atomic_block:
        transaction.on_commit(Hint(hint), using=using, robust=True)
    else:
        hint()


@contextmanager
def own_transaction(using: str) -> Iterator[None]:
    """Open a transaction as the log needs it, or join the caller's.

    Ours is READ COMMITTED whatever the session's default: only so does a statement after
    the lock see the last position. No savepoint inside a caller's: who writes here decides
    before it writes.
    """
    connection = connections[using]
    ours = not in_transaction(connection)
    with transaction.atomic(using=using, savepoint=False):
        if ours and connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        yield


def as_statement(using: str, call: Callable[[], T]) -> T:
    """Run a call that is one statement, as READ COMMITTED.

    Outside a transaction a statement has the session's default isolation, which a database
    or a role may set higher. The first refusal is remembered for this session; from then
    on the call gets a transaction of its own.
    """
    connection = connections[using]
    if in_transaction(connection):
        return call()
    # The wrapper outlives its sessions, and the next one may have another default.
    if getattr(connection, _HIGHER, None) != id(connection.connection):
        try:
            return call()
        except IsolationError:
            setattr(connection, _HIGHER, id(connection.connection))
    with own_transaction(using):
        return call()


def refuse_old_snapshot(using: str, call: str) -> None:
    """Raise `IsolationError` inside a transaction whose snapshot stays as it was at its start."""
    connection = connections[using]
    if connection.vendor != "postgresql" or not in_transaction(connection):
        return
    with connection.cursor() as cursor:
        cursor.execute("SHOW transaction_isolation")
        (level,) = cursor.fetchone()
    if level not in ("read committed", "read uncommitted"):
        raise IsolationError(
            f"{call} needs READ COMMITTED: under {level.upper()} it can't see what was appended "
            "since this transaction began. Do it outside this transaction."
        )


def written(write: Callable[[], object]) -> bool:
    """Do a write that is only a help; tell whether the database takes any.

    A replica doesn't, nor does a SQLite file that was opened to read.
    """
    try:
        write()
    except DatabaseError as error:
        read_only = getattr(error.__cause__, "sqlstate", None) == _READ_ONLY
        if not read_only and "readonly database" not in str(error):
            raise
        return False
    return True


@contextmanager
def naming_isolation(name: str) -> Iterator[None]:
    """Turn the functions' refusal of an old snapshot into `IsolationError`."""
    try:
        yield
    except DatabaseError as error:
        if getattr(error.__cause__, "sqlstate", None) != _WRONG_ISOLATION:
            raise
        raise IsolationError(
            f"append to {name!r} needs READ COMMITTED, and this transaction has an older "
            "snapshot that can't see the stream's last position. Use append_on_commit(), "
            "or append outside this transaction."
        ) from error
