"""Times as the log means them (aware), and as a database column holds them."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone


def now() -> dt.datetime:
    """Return the time, aware also in a project with `USE_TZ = False`."""
    return dt.datetime.now(dt.UTC)


def aware(value: dt.datetime, zone: dt.tzinfo | None) -> dt.datetime:
    """Return a column's value as an aware time; `zone` is the connection's."""
    if value.tzinfo is not None:
        return value
    return value.replace(tzinfo=zone or timezone.get_default_timezone())


def stored(value: dt.datetime, connection: BaseDatabaseWrapper) -> Any:
    """Return an aware time as a parameter for a column of this connection."""
    if connection.vendor == "postgresql":
        return value
    zone = connection.timezone or timezone.get_default_timezone()
    return str(value.astimezone(zone).replace(tzinfo=None))
