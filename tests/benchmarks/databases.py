"""A durable database of a benchmark's own, with Django set up on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psycopg

from tests.servers import private_folder, private_postgres

# No checkpoint in the middle of a measurement: whoever it hits would look slow.
SETTINGS = {"max_wal_size": "8GB", "checkpoint_timeout": "30min"}


@contextlib.contextmanager
def django_on(database: str, *, durable: bool = True) -> Iterator[str]:
    """Make a database, `postgres` or `sqlite`, migrated, and yield its psycopg DSN.

    Commits wait for the disk unless `durable` is off (PostgreSQL only), which is for a look
    whether a benchmark runs at all. Once per process, because Django is set up once; processes
    started from here inherit the environment and work on the same database. The DSN of
    SQLite is empty.
    """
    with private_folder("emq-bench-") as folder, contextlib.ExitStack() as stack:
        os.environ["ECHOMQ_TEST_DATABASE"] = database
        os.environ["ECHOMQ_TEST_FOLDER"] = str(folder)
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
        dsn = ""
        if database == "postgres":
            dsn = stack.enter_context(_postgres(folder, durable))
        import django
        from django.core.management import call_command
        from django.db import connections

        django.setup()
        call_command("migrate", verbosity=0)
        stack.callback(connections.close_all)
        yield dsn


@contextlib.contextmanager
def _postgres(folder: Path, durable: bool) -> Iterator[str]:
    with private_postgres(fsync=durable, folder=folder, settings=SETTINGS) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE DATABASE echomq")
        yield server.dsn("echomq")
