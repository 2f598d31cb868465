"""Times as the log means them (aware), and as a database column holds them."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from ..conf import project_setting


class _Clock:
    """What time it is; `echomq_app.testing.fake_clock` puts it on."""

    ahead = dt.timedelta()


clock = _Clock()


def now() -> dt.datetime:
    """Return the time, aware also in a project with `USE_TZ = False`."""
    return dt.datetime.now(dt.UTC) + clock.ahead


def database_now(using: str) -> dt.datetime:
    """Return the time by the database's clock: one for all workers, wherever they run.

    SQLite has none of its own; its processes share a machine.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        return now()
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()::text")
        return aware(cursor.fetchone()[0], None) + clock.ahead


def now_as_django() -> dt.datetime:
    """Return the time as the project has times: naive with `USE_TZ = False`."""
    return timezone.now() + clock.ahead


def as_django(value: dt.datetime) -> dt.datetime:
    """Return an aware time as this project has them: naive with `USE_TZ = False`."""
    return value if project_setting("USE_TZ", True) else timezone.make_naive(value)


def time_column(vendor: str, column: str) -> str:
    """Return SQL for a column of times whose values are for `aware`.

    PostgreSQL's come as text with their offset: read in a fraction of the time, and right also
    where `USE_TZ = False` would give local times, of which an hour each autumn is ambiguous.
    """
    return f"{column}::text" if vendor == "postgresql" else column


def aware(value: dt.datetime | str, zone: dt.tzinfo | None) -> dt.datetime:
    """Return a value of a `time_column` as an aware time; `zone` is the connection's."""
    if isinstance(value, str):
        return dt.datetime.fromisoformat(value)
    if value.tzinfo is not None:
        return value
    return value.replace(tzinfo=zone or timezone.get_default_timezone())


def from_cursor(value: dt.datetime | str, zone: dt.tzinfo | None) -> dt.datetime:
    """Return an aware time of what a cursor gives: SQLite has text, in the connection's zone."""
    return aware(dt.datetime.fromisoformat(value) if isinstance(value, str) else value, zone)


def in_utc(value: dt.datetime | str, zone: dt.tzinfo | None) -> str:
    """Return a value of a `time_column` as text, ISO 8601 in UTC."""
    if isinstance(value, str) and value.endswith("+00") and value[10] == " ":
        return f"{value[:10]}T{value[11:]}:00"  # how PostgreSQL writes it, for a session in UTC
    return aware(value, zone).astimezone(dt.UTC).isoformat()


def stored(value: dt.datetime, connection: BaseDatabaseWrapper) -> Any:
    """Return an aware time as a parameter for a column of this connection."""
    if connection.vendor == "postgresql":
        return value
    zone = connection.timezone or timezone.get_default_timezone()
    return str(value.astimezone(zone).replace(tzinfo=None))
