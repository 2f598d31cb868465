"""More databases than the run has: empty ones, other schemas, other options, other sessions."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import psycopg
from django.db import connection, connections
from django.db.backends.base.base import BaseDatabaseWrapper

T = TypeVar("T")

THREAD_TIMEOUT = 60.0
"""Seconds that a test's threads may take; then the test fails instead of hanging."""


@contextlib.contextmanager
def database_alias(alias: str, **changes: Any) -> Iterator[str]:
    """Add an alias to DATABASES for the length of the block: the default's entry, changed.

    `OPTIONS` are added to the default's, other keys replaced.
    """
    entry = copy.deepcopy(connections.databases["default"])
    entry["OPTIONS"] |= changes.pop("OPTIONS", {})
    connections.databases[alias] = {**entry, **changes}
    try:
        with _allowed(alias):
            yield alias
    finally:
        added = connections[alias]
        _close(added)
        if added.vendor == "postgresql":
            added.close_pool()  # type: ignore[attr-defined]
        del connections[alias]
        del connections.databases[alias]


def _close(wrapper: BaseDatabaseWrapper) -> None:
    """Close, also where Django's wrapper won't: a SQLite database in memory."""
    BaseDatabaseWrapper.close(wrapper)


@contextlib.contextmanager
def _allowed(alias: str) -> Iterator[None]:
    """Let tests connect to an alias that Django's test case, set up before, doesn't know."""
    guarded = BaseDatabaseWrapper.ensure_connection

    def ensure_connection(self: BaseDatabaseWrapper) -> None:
        if self.alias != alias:
            guarded(self)
        elif self.connection is None:
            with self.wrap_database_errors:
                self.connect()

    with mock.patch.object(BaseDatabaseWrapper, "ensure_connection", ensure_connection):
        yield


@contextlib.contextmanager
def empty_database(alias: str, folder: Path) -> Iterator[str]:
    """Give an alias for a database of its own that holds nothing."""
    if connection.vendor == "sqlite":
        with database_alias(alias, NAME=str(folder / f"{alias}.sqlite3")):
            yield alias
        return
    name = f"echomq_{alias}"
    with connection.cursor() as cursor:
        cursor.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')
        cursor.execute(f'CREATE DATABASE "{name}"')
    try:
        with database_alias(alias, NAME=name):
            yield alias
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


def session() -> psycopg.Connection[Any]:
    """Open another session on the test database (PostgreSQL), in autocommit.

    A context manager; a transaction in it is opened and ended by SQL.
    """
    parameters = connection.get_connection_params()
    kept = {key: parameters[key] for key in ("dbname", "user", "host", "port")}
    return psycopg.connect(**kept, autocommit=True)


def end(connection: BaseDatabaseWrapper) -> None:
    """Roll back what a copy of a connection has open, and close it: its locks are free then.

    To close it alone isn't enough: the server may notice a little later.
    """
    if connection.connection is not None:
        connection.connection.rollback()
    connection.close()


def concurrently(*calls: Callable[[], T], timeout: float = THREAD_TIMEOUT) -> list[T]:
    """Run each call in a thread of its own, and return their results in order.

    Raises the first call's error. Each thread closes its database connections.
    """
    with ThreadPoolExecutor(len(calls)) as threads:
        futures = [threads.submit(closing_connections, call) for call in calls]
        for future in as_completed(futures, timeout):
            future.result()  # the first to fail: others may wait for it for ever
        return [future.result() for future in futures]


def closing_connections(call: Callable[[], T]) -> T:
    """Call, then close this thread's database connections."""
    try:
        return call()
    finally:
        for wrapper in connections.all(initialized_only=True):
            _close(wrapper)


@contextlib.contextmanager
def in_thread(call: Callable[[], T]) -> Iterator[Future[T]]:
    """Run a call in a thread while the block runs; the block's end waits for it."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(closing_connections, call)


def waiting_sessions() -> int:
    """Count the sessions on this PostgreSQL database that wait for a lock now."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND wait_event_type = 'Lock'"
        )
        return int(cursor.fetchone()[0])


@contextlib.contextmanager
def refusing(event: str, table: str, when: str) -> Iterator[Callable[[], None]]:
    """Have the database refuse a DELETE or UPDATE of some rows; yield what ends that early."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
                " $$ BEGIN RAISE 'not today'; END $$;"
                f"CREATE TRIGGER refuse BEFORE {event} ON {table} FOR EACH ROW"
                f" WHEN ({when}) EXECUTE FUNCTION refuse()"
            )
        else:
            cursor.execute(
                f"CREATE TRIGGER refuse BEFORE {event} ON {table} WHEN {when}"
                " BEGIN SELECT RAISE(ABORT, 'not today'); END"
            )
    try:
        yield _allow
    finally:
        _allow()


def _allow() -> None:
    function = connection.vendor == "postgresql"
    with connection.cursor() as cursor:
        cursor.execute(
            "DROP FUNCTION IF EXISTS refuse CASCADE"
            if function
            else "DROP TRIGGER IF EXISTS refuse"
        )
