"""Which job has a unique key, and the taking of a key for a time.

A job that is unique while it waits or runs has its key in a column, and a partial unique
index says that there is one. A key that is taken for a number of seconds has a row in
`UniqueWindow`: taking it is one statement, which the database decides on that row alone.
"""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any, NamedTuple

from django.db import connections

from ..core.ids import JobId
from ..models.job import JobState
from ..models.times import from_cursor, stored

# The database's clock: those who enqueue may have another one each.
TAKE_POSTGRES = (
    "INSERT INTO echomq_uniquewindow (key, job_id, until)"
    " VALUES (%s, %s, clock_timestamp() + make_interval(secs => %s))"
    " ON CONFLICT (key) DO UPDATE SET job_id = excluded.job_id, until = excluded.until"
    " WHERE echomq_uniquewindow.until <= clock_timestamp() RETURNING key"
)
"""Parameters: key, job, seconds. Returns a row if the key is ours."""

_TAKE_SQLITE = (
    "INSERT INTO echomq_uniquewindow (key, job_id, until) VALUES (%s, %s, %s)"
    " ON CONFLICT (key) DO UPDATE SET job_id = excluded.job_id, until = excluded.until"
    " WHERE echomq_uniquewindow.until <= %s"
)
# The index's own condition stands there word by word: SQLite looks for it.
_ACTIVE = (
    "SELECT id, state, enqueued_at FROM echomq_job WHERE unique_key = %s"
    " AND NOT (unique_key = '') AND state IN ('ready', 'scheduled', 'running')"
)
_IN_WINDOW = (
    "SELECT w.job_id, j.state, j.enqueued_at FROM echomq_uniquewindow w"
    " LEFT JOIN echomq_job j ON j.id = w.job_id WHERE w.key = %s"
)


class Holder(NamedTuple):
    """The job that has a key."""

    id: JobId
    state: JobState
    enqueued_at: dt.datetime


def take_sqlite(cursor: Any, key: str, job: str, at: dt.datetime, seconds: float) -> bool:
    """Take a key for a job (its hex), in a transaction that writes; tell whether it is ours."""
    until = at + dt.timedelta(seconds=seconds)
    moments = [stored(moment, cursor.db) for moment in (until, at)]
    cursor.execute(_TAKE_SQLITE, (key, job, *moments))
    return bool(cursor.rowcount)


def holder(using: str, key: str, *, window: bool) -> Holder | None:
    """Return the job that has a key; None if nobody has it any more."""
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(_IN_WINDOW if window else _ACTIVE, (key,))
        row = cursor.fetchone()
        if row is None:
            return None
        id, state, enqueued_at = row
        if state is None:
            # Somebody deleted the job: there is no result to give, so the key is free.
            cursor.execute(
                "DELETE FROM echomq_uniquewindow WHERE key = %s AND job_id = %s", (key, id)
            )
            return None
    return Holder(
        id=JobId.from_uuid(id if isinstance(id, uuid.UUID) else uuid.UUID(id)),
        state=JobState(state),
        enqueued_at=from_cursor(enqueued_at, connection.timezone),
    )
