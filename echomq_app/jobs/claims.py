"""Claim: take ready jobs for a worker, a batch in one statement.

The floor: each claim of a queue starts where the last one ended. With a snapshot held
open elsewhere the index keeps an entry for every job claimed since, and claims from the
front get slower without end. What the floor hides (a higher priority, a transaction
that committed late) is found from the front, every second and whenever a claim comes
up short.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
import uuid
from collections.abc import Callable
from typing import Any

from django.db import connections, transaction

from ..core.ids import JobId
from ..core.payload import decode
from ..models.job import JobState
from ..models.times import from_cursor, now, stored
from . import journal
from .connections import read_committed
from .journal import Entry

FRONT_INTERVAL = 1.0
"""Seconds after which a claim starts from the front again."""

_POSTGRES = "SELECT * FROM echomq_claim_v1(%s, %s, %s, %s, %s)"

_FREE = (
    "queue = %s AND state = 'ready' AND parked = 0 AND NOT EXISTS"
    " (SELECT 1 FROM echomq_cancelrequest c WHERE c.job_id = echomq_job.id)"
)
_ANY_READY = f"SELECT EXISTS (SELECT 1 FROM echomq_job WHERE {_FREE})"
_SQLITE = (
    "UPDATE echomq_job SET state = 'running', fence = fence + 1, attempt = attempt + 1,"
    " worker_id = %s, worker_name = %s, attempted_at = %s, started_at = coalesce(started_at, %s),"
    " progress = NULL, progress_note = ''"
    f" WHERE id IN (SELECT id FROM echomq_job WHERE {_FREE}"
    " ORDER BY priority DESC, run_after, id LIMIT %s)"
    " AND EXISTS (SELECT 1 FROM echomq_worker w"
    " WHERE w.id = %s AND w.lost_at IS NULL AND w.stopped_at IS NULL)"
    " RETURNING id, task_path, arguments, priority, run_after, attempt, max_attempts, options,"
    " fence, errors, enqueued_at, started_at, attempted_at"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedJob:
    """A job as it was claimed. `fence` is what proves the claim in every later write."""

    id: JobId
    queue: str
    task_path: str
    arguments: Any
    priority: int
    run_after: dt.datetime
    attempt: int
    max_attempts: int
    options: dict[str, Any]
    fence: int
    errors: list[dict[str, Any]]
    enqueued_at: dt.datetime
    started_at: dt.datetime
    attempted_at: dt.datetime
    worker_name: str


@dataclasses.dataclass(slots=True)
class _Floor:
    priority: int
    run_after: dt.datetime


class Claims:
    """Claims of one worker. One thread at a time."""

    def __init__(self, using: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._using = using
        self._clock = clock
        self._floors: dict[str, _Floor] = {}
        self._from_front: dict[str, float] = {}

    def take(self, queue: str, *, worker_id: int, worker_name: str, limit: int) -> list[ClaimedJob]:
        """Claim up to `limit` jobs, the highest priority and the longest due first.

        Committed when it returns, and so is the record of each start.
        """
        if limit < 1:
            return []
        if connections[self._using].vendor == "sqlite":
            return self._take_sqlite(queue, worker_id, worker_name, limit)
        claimed: list[ClaimedJob] = []
        floor = self._floors.get(queue)
        if floor is not None and self._clock() - self._from_front[queue] < FRONT_INTERVAL:
            claimed = self._take_postgres(queue, worker_id, worker_name, limit, floor)
        if len(claimed) < limit:
            self._from_front[queue] = self._clock()
            rest = limit - len(claimed)
            claimed += self._take_postgres(queue, worker_id, worker_name, rest, None)
            if len(claimed) < limit:
                self._floors.pop(queue, None)
        return claimed

    def _take_postgres(
        self, queue: str, worker_id: int, worker_name: str, limit: int, floor: _Floor | None
    ) -> list[ClaimedJob]:
        connection = connections[self._using]
        limits = (None, None) if floor is None else (floor.priority, floor.run_after)
        with read_committed(self._using), connection.cursor() as cursor:
            cursor.execute(_POSTGRES, (queue, worker_id, limit, *limits))
            rows = cursor.fetchall()
        claimed = [self._claimed(queue, worker_name, row) for row in rows]
        if claimed:
            last = claimed[-1]
            self._floors[queue] = _Floor(last.priority, last.run_after)
        return claimed

    def _take_sqlite(
        self, queue: str, worker_id: int, worker_name: str, limit: int
    ) -> list[ClaimedJob]:
        connection = connections[self._using]
        with connection.cursor() as cursor:
            # A look without the write lock: an idle worker must not disturb the writers.
            cursor.execute(_ANY_READY, (queue,))
            if not cursor.fetchone()[0]:
                return []
        at = stored(now(), connection)
        with transaction.atomic(using=self._using), connection.cursor() as cursor:
            cursor.execute(_SQLITE, (worker_id, worker_name, at, at, queue, limit, worker_id))
            claimed = [self._claimed(queue, worker_name, row) for row in cursor.fetchall()]
            # RETURNING has no order.
            claimed.sort(key=lambda job: (-job.priority, job.run_after, job.id.int))
            journal.write(self._using, [started(job) for job in claimed])
        return claimed

    def _claimed(self, queue: str, worker_name: str, row: tuple[Any, ...]) -> ClaimedJob:
        zone = connections[self._using].timezone
        return ClaimedJob(
            id=JobId.from_uuid(row[0] if isinstance(row[0], uuid.UUID) else uuid.UUID(row[0])),
            queue=queue,
            task_path=row[1],
            arguments=decode(row[2]),
            priority=row[3],
            run_after=from_cursor(row[4], zone),
            attempt=row[5],
            max_attempts=row[6],
            options=decode(row[7]),
            fence=row[8],
            errors=decode(row[9]),
            enqueued_at=from_cursor(row[10], zone),
            started_at=from_cursor(row[11], zone),
            attempted_at=from_cursor(row[12], zone),
            worker_name=worker_name,
        )


def started(job: ClaimedJob) -> Entry:
    """Say that an attempt has begun. On PostgreSQL the claim records the same itself."""
    data = {
        "id": str(job.id),
        "task": job.task_path,
        "state": JobState.RUNNING.value,
        "attempt": job.attempt,
        "at": journal.timestamp(job.attempted_at),
        "worker": job.worker_name,
    }
    return Entry(job.queue, journal.STARTED, job.id, data)
