"""A connection of one thread's own, apart from the project's pool.

For our background threads. They live long, so they keep it; they must not take one of
the few connections of a pool that handlers or requests wait for; they read and write READ
COMMITTED whatever the project has chosen, because they have to see what was committed;
and they notice within seconds that the other side is gone, or doesn't answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

# Seconds (and milliseconds), so that a half-open socket is found out. A project's own
# OPTIONS win.
_POSTGRES_OPTIONS = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


@contextmanager
def private_connection(using: str, purpose: str) -> Iterator[BaseDatabaseWrapper]:
    """Let `connections[using]` be this thread's own, opened on first use, closed at the end.

    `purpose` stands in PostgreSQL's `application_name`.
    """
    previous = connections[using]
    own = previous.copy()
    own.settings_dict = _settings(own.vendor, own.settings_dict, purpose)
    connections[using] = own
    try:
        yield own
    finally:
        own.close()
        connections[using] = previous


def _settings(vendor: str, settings: dict[str, Any], purpose: str) -> dict[str, Any]:
    given = dict(settings.get("OPTIONS", {}))
    given.pop("pool", None)
    # It lives as long as the thread, and nobody would commit what it has begun.
    settings = {
        **settings,
        "CONN_MAX_AGE": None,
        "CONN_HEALTH_CHECKS": False,
        "AUTOCOMMIT": True,
    }
    if vendor == "sqlite":
        given["transaction_mode"] = "IMMEDIATE"
        return {**settings, "OPTIONS": given}
    from django.db.backends.postgresql.psycopg_any import IsolationLevel

    options = {
        **_POSTGRES_OPTIONS,
        **given,
        "application_name": f"echomq {purpose}",
        "isolation_level": IsolationLevel.READ_COMMITTED,
    }
    return {**settings, "OPTIONS": options}
