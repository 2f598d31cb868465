"""What workers look for all the time: each look is a few steps in an index, for all queues at once.

Written out, because neither database finds these plans by itself. To PostgreSQL, "is there any"
is a promise that the first blocks of the table will do, and with a million jobs that aren't due
it reads them all: an ORDER BY that the index has leaves it no choice. SQLite uses a partial
index only for a condition that stands in the statement word by word, not for a parameter.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Collection
from typing import Any, NamedTuple

from django.db import connections

from ..core.ids import JobId
from ..models.times import from_cursor, stored

_QUEUES = {
    "postgresql": "unnest(%s::text[]) AS q(name)",
    "sqlite": "(SELECT value AS name FROM json_each(%s)) AS q",
}
_DUE = (
    "SELECT q.name,"
    " (SELECT j.run_after FROM echomq_job j WHERE j.queue = q.name AND j.state = 'scheduled'"
    " AND j.run_after <= %s ORDER BY j.run_after LIMIT 1) IS NOT NULL,"
    " (SELECT j.run_after FROM echomq_job j WHERE j.queue = q.name AND j.state = 'scheduled'"
    " AND j.run_after > %s ORDER BY j.run_after LIMIT 1) FROM "
)
_PAGE = (
    "SELECT j.id FROM echomq_job j WHERE j.queue = %s AND j.state = 'scheduled'"
    " AND j.run_after <= %s ORDER BY j.run_after LIMIT %s"
)
_LOCKING = {"postgresql": " FOR NO KEY UPDATE OF j SKIP LOCKED", "sqlite": ""}
# SQLite: twice the same, for the two ways in which Django has written the index's condition.
_READY = (
    "SELECT q.name FROM {} WHERE"
    " (SELECT 1 FROM echomq_job j WHERE j.queue = q.name AND j.state = 'ready' AND {}"
    " ORDER BY j.priority DESC, j.run_after, j.id LIMIT 1) IS NOT NULL OR"
    " (SELECT 1 FROM echomq_job j WHERE j.queue = q.name AND j.parked AND j.state = 'ready'"
    " AND NOT (j.group_key = '') ORDER BY j.group_key LIMIT 1) IS NOT NULL"
)
_ABANDONED = (
    "SELECT j.id FROM echomq_job j WHERE j.state = 'running' AND NOT EXISTS"
    " (SELECT 1 FROM echomq_worker w"
    " WHERE w.id = j.worker_id AND w.lost_at IS NULL AND w.stopped_at IS NULL)"
    " ORDER BY j.worker_id LIMIT %s"
)
_NOT_PARKED = {"postgresql": "NOT j.parked", "sqlite": "j.parked = 0 AND NOT j.parked"}


class Due(NamedTuple):
    """What is scheduled."""

    queues: list[str]
    """Those with jobs whose time has come."""
    next_at: dt.datetime | None
    """When the next one is due that isn't yet."""


def due(using: str, queues: Collection[str], at: dt.datetime) -> Due:
    """Look at the scheduled jobs of these queues, at the time `at`."""
    connection = connections[using]
    moment = stored(at, connection)
    with connection.cursor() as cursor:
        statement = _DUE + _QUEUES[connection.vendor]
        cursor.execute(statement, (moment, moment, _names(connection, queues)))
        rows = cursor.fetchall()
    times = [from_cursor(row[2], connection.timezone) for row in rows if row[2] is not None]
    return Due([name for name, is_due, _ in rows if is_due], min(times, default=None))


def due_page(using: str, queue: str, at: dt.datetime, limit: int) -> list[JobId]:
    """Return the ids of jobs that are due, locked where rows can be locked and are free."""
    connection = connections[using]
    with connection.cursor() as cursor:
        statement = _PAGE + _LOCKING[connection.vendor]
        cursor.execute(statement, (queue, stored(at, connection), limit))
        return [_job_id(id) for (id,) in cursor.fetchall()]


def with_ready_jobs(using: str, queues: Collection[str]) -> list[str]:
    """Return those of these queues in which a job is ready, also if its group is full."""
    connection = connections[using]
    vendor = connection.vendor
    with connection.cursor() as cursor:
        statement = _READY.format(_QUEUES[vendor], _NOT_PARKED[vendor])
        cursor.execute(statement, (_names(connection, queues),))
        return [name for (name,) in cursor.fetchall()]


def abandoned(using: str, limit: int) -> list[JobId]:
    """Return ids of running jobs that no living worker has, in the order of the ids."""
    with connections[using].cursor() as cursor:
        cursor.execute(_ABANDONED, (limit,))
        return sorted(_job_id(id) for (id,) in cursor.fetchall())


def _job_id(value: Any) -> JobId:
    return JobId.from_uuid(value if isinstance(value, uuid.UUID) else uuid.UUID(value))


def _names(connection: Any, queues: Collection[str]) -> Any:
    return json.dumps(list(queues)) if connection.vendor == "sqlite" else list(queues)
