"""Claims on SQLite: the same rules as `echomq_claim_v1`, for a database with one writer.

Who writes has the only write lock there is, so a group's limit is exact by itself. The
conditions stand word by word as in the partial indexes, or SQLite doesn't use them.
"""

from __future__ import annotations

from typing import Any

from django.db import connections

_CANCELLED = "EXISTS (SELECT 1 FROM echomq_cancelrequest c WHERE c.job_id = j.id)"
# Twice the same: Django 5.2 wrote the index's condition in one way, 6.1 in the other.
_NOT_PARKED = "j.parked = 0 AND NOT j.parked"
_FREE = f"j.queue = %s AND j.state = 'ready' AND {_NOT_PARKED} AND NOT {_CANCELLED}"
_OPEN = "NOT EXISTS (SELECT 1 FROM echomq_queue q WHERE q.name = %s AND q.paused_at IS NOT NULL)"
_ANY_READY = f"SELECT EXISTS (SELECT 1 FROM echomq_job j WHERE {_FREE}) AND {_OPEN}"
# A write first, also where transactions begin deferred: it takes the lock, or waits for it.
_LOCK = "UPDATE echomq_job SET parked = parked WHERE id IS NULL"
_IS_OPEN = (
    f"SELECT {_OPEN} AND EXISTS (SELECT 1 FROM echomq_worker w"
    " WHERE w.id = %s AND w.lost_at IS NULL AND w.stopped_at IS NULL)"
)
_FRONT = (
    f"SELECT j.id, j.group_key, j.group_limit FROM echomq_job j WHERE {_FREE}"
    " AND j.group_key NOT IN ({passed}) AND j.id NOT IN ({taken})"
    " ORDER BY j.priority DESC, j.run_after, j.id LIMIT %s"
)
_OF_GROUP = "state = 'ready' AND NOT (group_key = '')"
_GROUP = f"{_OF_GROUP} AND queue = %s AND group_key = %s"
_NEXT_GROUP = (
    f"SELECT group_key FROM echomq_job WHERE {_OF_GROUP} AND queue = %s AND parked = 1"
    " AND group_key > %s ORDER BY group_key LIMIT 1"
)
_HEADS = (
    f"SELECT id, group_limit FROM echomq_job WHERE {_GROUP} AND parked = 1"
    " ORDER BY priority DESC, run_after, id LIMIT %s"
)
_USED = (
    "SELECT count(*) FROM echomq_job WHERE state = 'running' AND NOT (group_key = '')"
    " AND group_key = %s"
)
_FREE_OF_GROUP = f"SELECT count(*) FROM echomq_job WHERE {_GROUP} AND parked = 0"
_UNPARK = "UPDATE echomq_job SET parked = 0 WHERE id IN ({ids})"
_PARK = f"UPDATE echomq_job SET parked = 1 WHERE {_GROUP} AND parked = 0 AND id NOT IN ({{ids}})"
_CLAIM = (
    "UPDATE echomq_job SET state = 'running', fence = fence + 1, worker_id = %s, worker_name = %s,"
    " progress = NULL, progress_note = '' WHERE id IN ({ids})"
    " RETURNING id, task_path, arguments, priority, run_after, attempt, max_attempts, options,"
    " fence, errors, enqueued_at, started_at, attempted_at"
)
MOST = 10_000
"""Jobs of one claim: a statement has so many parameters."""


def worth_a_claim(using: str, queue: str) -> bool:
    """Tell whether a claim may find something, without the write lock.

    An idle worker must not disturb the writers.
    """
    with connections[using].cursor() as cursor:
        cursor.execute(_ANY_READY, (queue, queue))
        return bool(cursor.fetchone()[0]) or bool(_next_of_groups(cursor, queue))


def take(using: str, queue: str, worker_id: int, worker_name: str, limit: int) -> list[Any]:
    """Claim up to `limit` jobs in the caller's transaction; return their rows, in any order."""
    connection = connections[using]
    with connection.cursor() as cursor:
        cursor.execute(_LOCK)
        cursor.execute(_IS_OPEN, (queue, worker_id))
        if not cursor.fetchone()[0]:
            return []
        unparked = _next_of_groups(cursor, queue)
        if unparked:
            cursor.execute(_UNPARK.format(ids=_marks(unparked)), unparked)
        taken = _admitted(cursor, queue, min(limit, MOST))
        if not taken:
            return []
        cursor.execute(_CLAIM.format(ids=_marks(taken)), [worker_id, worker_name, *taken])
        return list(cursor.fetchall())


def _admitted(cursor: Any, queue: str, limit: int) -> list[str]:
    """Choose the jobs to claim; park those whose group is full."""
    taken: list[str] = []
    passed: list[str] = []
    used: dict[str, int] = {}
    while len(taken) < limit:
        statement = _FRONT.format(passed=_marks(passed), taken=_marks(taken))
        cursor.execute(statement, (queue, *passed, *taken, limit - len(taken)))
        batch = cursor.fetchall()
        wanted = limit - len(taken)
        for id, group, most in batch:
            if group and group not in used:
                cursor.execute(_USED, (group,))
                used[group] = cursor.fetchone()[0]
            if not group or used[group] < (most or 1):
                taken.append(id)
                used[group] = used.get(group, 0) + 1
            elif group not in passed:
                passed.append(group)
        for group in passed:
            cursor.execute(_PARK.format(ids=_marks(taken)), (queue, group, *taken))
        if len(batch) < wanted:
            break
    return taken


def _next_of_groups(cursor: Any, queue: str) -> list[str]:
    """Return the parked jobs for which their groups have room."""
    found: list[str] = []
    group = ""
    while True:
        cursor.execute(_NEXT_GROUP, (queue, group))
        row = cursor.fetchone()
        if row is None:
            return found
        group = row[0]
        cursor.execute(_HEADS, (queue, group, 1))
        most = cursor.fetchone()[1] or 1
        cursor.execute(_USED, (group,))
        room = most - cursor.fetchone()[0]
        cursor.execute(_FREE_OF_GROUP, (queue, group))
        room -= cursor.fetchone()[0]
        if room > 0:
            cursor.execute(_HEADS, (queue, group, room))
            found += [id for id, _ in cursor.fetchall()]


def _marks(values: list[str]) -> str:
    return ", ".join(["%s"] * len(values))
