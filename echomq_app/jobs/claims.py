"""Claim: take ready jobs for a worker, a batch in one statement.

The floor: each claim of a queue starts where the last one ended. With a snapshot held
open elsewhere the index keeps an entry for every job claimed since, and claims from the
front get slower without end. What the floor hides (a higher priority, a transaction
that committed late) is found from the front, every second and whenever a claim comes
up short.

Groups: see `echomq_claim_v1`. Jobs of a full group are parked by the claim that meets them,
and made eligible again by claims from the front.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import time
import uuid
from collections.abc import Callable
from typing import Any, Self

from django.db import connections, transaction

from ..core.ids import JobId
from ..core.payload import decode
from ..models.job import Job
from ..models.times import aware, from_cursor
from . import claims_sqlite
from .connections import read_committed

FRONT_INTERVAL = 1.0
"""Seconds after which a claim starts from the front again."""
GROUPS_INTERVAL = 0.1
"""The same for a queue with jobs that wait for room in their groups: those are older."""
ROUNDS = 200
"""Claims from the front, one after the other, that a group's backlog may cost at most."""

_POSTGRES = "SELECT * FROM echomq_claim_v1(%s, %s, %s, %s, %s, %s)"


@dataclasses.dataclass(slots=True, kw_only=True)
class ClaimedJob:
    """A job as it was claimed. `fence` is what proves the claim in every later write.

    `attempt` is the number that this attempt has when its handler begins; until then it isn't
    counted, and `attempted_at` is that of the attempt before.
    """

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
    started_at: dt.datetime | None
    attempted_at: dt.datetime | None
    worker_name: str
    has_begun: bool = False
    """Whether the claim has counted the attempt, too."""

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return the claim that a running job's row says it has."""
        values = {field.name: getattr(job, field.name) for field in dataclasses.fields(cls)}
        times = {
            name: aware(value, None)
            for name, value in values.items()
            if isinstance(value, dt.datetime)
        }
        attempt = job.attempt if job.has_begun else job.attempt + 1
        return cls(**{**values, **times, "attempt": attempt})


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
        self._parked: set[str] = set()
        """Queues in which jobs wait for room in their groups."""

    def take(
        self, queue: str, *, worker_id: int, worker_name: str, limit: int, count_first: int = 0
    ) -> list[ClaimedJob]:
        """Claim up to `limit` jobs, the highest priority and the longest due first.

        Committed when it returns. `count_first`: so many at most are counted as begun, on
        PostgreSQL.
        """
        if limit < 1:
            return []
        if connections[self._using].vendor == "sqlite":
            return self._take_sqlite(queue, worker_id, worker_name, limit)
        claimed: list[ClaimedJob] = []
        floor = self._floors.get(queue)
        interval = GROUPS_INTERVAL if queue in self._parked else FRONT_INTERVAL
        if floor is not None and self._clock() - self._from_front[queue] < interval:
            of = (queue, worker_id, worker_name)
            claimed, _ = self._take_postgres(*of, limit, floor, count_first)
        for _ in range(ROUNDS):
            rest = limit - len(claimed)
            if not rest:
                break
            self._from_front[queue] = self._clock()
            count = max(0, count_first - len(claimed))
            more, again = self._take_postgres(queue, worker_id, worker_name, rest, None, count)
            claimed += more
            if not again:
                break
        if len(claimed) < limit:
            self._floors.pop(queue, None)
        return claimed

    def _take_postgres(
        self,
        queue: str,
        worker_id: int,
        worker_name: str,
        limit: int,
        floor: _Floor | None,
        count_first: int,
    ) -> tuple[list[ClaimedJob], bool]:
        """Return what was claimed, and whether another claim may find more at once."""
        connection = connections[self._using]
        limits = (None, None) if floor is None else (floor.priority, floor.run_after)
        with read_committed(self._using), connection.cursor() as cursor:
            cursor.execute(_POSTGRES, (queue, worker_id, limit, *limits, count_first))
            rows = cursor.fetchall()
        said = rows.pop()[1] if rows and rows[-1][0] is None else ""
        if said:
            self._parked.add(queue)
        elif floor is None:
            self._parked.discard(queue)
        claimed = [self._claimed(queue, worker_name, row) for row in rows]
        if claimed:
            last = claimed[-1]
            self._floors[queue] = _Floor(last.priority, last.run_after)
        return claimed, said == "again"

    def _take_sqlite(
        self, queue: str, worker_id: int, worker_name: str, limit: int
    ) -> list[ClaimedJob]:
        if not claims_sqlite.worth_a_claim(self._using, queue):
            return []
        with transaction.atomic(using=self._using):
            rows = claims_sqlite.take(self._using, queue, worker_id, worker_name, limit)
            claimed = [self._claimed(queue, worker_name, row) for row in rows]
            claimed.sort(key=lambda job: (-job.priority, job.run_after, job.id.int))
        return claimed

    def _claimed(self, queue: str, worker_name: str, row: tuple[Any, ...]) -> ClaimedJob:
        zone = connections[self._using].timezone
        has_begun = bool(row[13:] and row[13])
        return ClaimedJob(
            id=JobId.from_uuid(row[0] if isinstance(row[0], uuid.UUID) else uuid.UUID(row[0])),
            queue=queue,
            task_path=row[1],
            arguments=decode(row[2]),
            priority=row[3],
            run_after=from_cursor(row[4], zone),
            attempt=row[5] + (not has_begun),
            max_attempts=row[6],
            options=decode(row[7]),
            fence=row[8],
            errors=decode(row[9]),
            enqueued_at=from_cursor(row[10], zone),
            started_at=None if row[11] is None else from_cursor(row[11], zone),
            attempted_at=None if row[12] is None else from_cursor(row[12], zone),
            worker_name=worker_name,
            has_begun=has_begun,
        )
