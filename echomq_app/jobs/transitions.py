"""Write how attempts ended: many jobs in one transaction, each only if it is still ours.

Two rules keep it from ever waiting for somebody else's transaction. Rows are locked in
id order and rows that are locked already are passed over (they come back as `later`);
and the job rows come first, the queue's stream last, which on PostgreSQL is only the
outbox. A row whose fence or state is another one isn't ours any more: `lost`.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from django.db import connections, transaction
from django.db.models import Exists, OuterRef

from ..core.ids import JobId
from ..models.job import CancelRequest, Job, JobState
from ..models.times import now, stored
from . import announcing, journal
from .journal import Entry
from .outcomes import Outcome, Verdict, decide

_LOCK = (
    "SELECT j.id, j.fence, EXISTS (SELECT FROM echomq_cancelrequest c WHERE c.job_id = j.id)"
    " FROM echomq_job j WHERE j.id = ANY (%s::uuid[]) AND j.state = 'running'"
    " ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED"
)
# One text goes there, not a list for each column: psycopg would quote every value by itself.
_POSTGRES = (
    "UPDATE echomq_job AS j SET state = v.state, attempt = v.attempt,"
    " run_after = coalesce(v.run_after, j.run_after), finished_at = v.finished_at,"
    " worker_id = CASE WHEN v.finished_at IS NULL THEN NULL ELSE j.worker_id END,"
    " result = v.result::jsonb, errors = coalesce(v.errors::jsonb, j.errors),"
    " cancel_reason = v.reason, cancel_kind = v.kind, progress = coalesce(v.progress, j.progress),"
    " progress_note = coalesce(v.note, j.progress_note)"
    " FROM json_to_recordset(%s::json)"
    " AS v(id uuid, fence bigint, state text, attempt integer, run_after timestamptz,"
    " finished_at timestamptz, result text, errors text, reason text, kind text,"
    " progress float8, note text)"
    " WHERE j.id = v.id AND j.fence = v.fence AND j.state = 'running'"
)
_SQLITE = (
    "UPDATE echomq_job SET state = %s, attempt = %s, run_after = coalesce(%s, run_after),"
    " finished_at = %s, worker_id = CASE WHEN %s THEN NULL ELSE worker_id END, result = %s,"
    " errors = coalesce(%s, errors), cancel_reason = %s, cancel_kind = %s,"
    " progress = coalesce(%s, progress),"
    " progress_note = coalesce(%s, progress_note)"
    " WHERE id = %s AND fence = %s AND state = 'running'"
)
_PROGRESS_POSTGRES = (
    "UPDATE echomq_job AS j SET progress = v.progress, progress_note = v.note"
    " FROM unnest(%s::uuid[], %s::bigint[], %s::float8[], %s::text[])"
    " AS v(id, fence, progress, note)"
    " WHERE j.id = v.id AND j.fence = v.fence AND j.state = 'running' AND j.id IN"
    " (SELECT id FROM echomq_job WHERE id = ANY (%s::uuid[]) ORDER BY id"
    " FOR NO KEY UPDATE SKIP LOCKED)"
)
_PROGRESS_SQLITE = (
    "UPDATE echomq_job SET progress = %s, progress_note = %s"
    " WHERE id = %s AND fence = %s AND state = 'running'"
)


_REQUESTS = CancelRequest.objects.filter(job=OuterRef("pk"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What came of a batch of outcomes."""

    entries: list[Entry]
    """Committed, to be published."""
    later: list[Outcome]
    """Still ours, but somebody holds the row: try again."""
    lost: list[Outcome]
    """Not ours any more (or already written): nothing to do."""
    ready: bool = False
    """Whether a job may be claimed now that was ours."""


def settle(using: str, outcomes: Iterable[Outcome]) -> Settlement:
    """Write outcomes in a transaction of their own; the first one of a job's last claim counts.

    The ends of jobs are announced after it.

    Raises what the database raises; then nothing was written.
    """
    by_id: dict[JobId, Outcome] = {}
    for outcome in outcomes:
        other = by_id.get(outcome.id)
        if other is None or outcome.fence > other.fence:
            by_id[outcome.id] = outcome
    if not by_id:
        return Settlement(entries=[], later=[], lost=[])
    with transaction.atomic(using=using):
        ours, asked = _lock(using, list(by_id.values()))
        requests = CancelRequest.objects.using(using).for_jobs(asked) if asked else {}
        at = now()
        verdicts = [
            decide(outcome, now=at, **_request(requests.get(outcome.id))) for outcome in ours
        ]
        if verdicts:
            _update(using, verdicts)
            done = [v.outcome.id for v in verdicts if v.finished and v.outcome.id in requests]
            if done:
                CancelRequest.objects.using(using).filter(job__in=done).delete()
        entries = [entry for verdict in verdicts for entry in verdict.entries]
        journal.write(using, entries)
        rest = [by_id[id] for id in by_id.keys() - {outcome.id for outcome in ours}]
        later = _still_ours(using, rest)
    announcing.ended(verdict for verdict in verdicts if verdict.finished)
    lost = [outcome for outcome in rest if outcome not in later]
    ready = any(verdict.state is JobState.READY for verdict in verdicts)
    return Settlement(entries=entries, later=later, lost=lost, ready=ready)


def write_progress(using: str, reports: Sequence[tuple[JobId, int, float, str]]) -> None:
    """Store progress (id, fence, fraction, note), where nobody holds the row."""
    connection = connections[using]
    with transaction.atomic(using=using), connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            rows = [(part, note, id.hex, fence) for id, fence, part, note in reports]
            cursor.executemany(_PROGRESS_SQLITE, rows)
            return
        ids = [id.hex for id, *_ in reports]
        columns = [list(column) for column in zip(*(report[1:] for report in reports), strict=True)]
        cursor.execute(_PROGRESS_POSTGRES, (ids, *columns, ids))


def _lock(using: str, outcomes: list[Outcome]) -> tuple[list[Outcome], list[JobId]]:
    """Lock the rows that are ours and free, in id order.

    Return their outcomes, and the jobs that somebody asked to cancel.
    """
    connection = connections[using]
    if connection.vendor == "postgresql":
        ids = ",".join([f"{outcome.id.int:032x}" for outcome in outcomes])
        with connection.cursor() as cursor:
            cursor.execute(_LOCK, (f"{{{ids}}}",))
            rows = cursor.fetchall()
    else:  # the write lock is ours
        running = Job.objects.using(using).running()
        of_these = running.filter(pk__in=[outcome.id for outcome in outcomes])
        rows = list(of_these.values_list("pk", "fence", Exists(_REQUESTS)))
    found = {id.int: (fence, asked) for id, fence, asked in rows}
    none = (None, False)
    ours = [outcome for outcome in outcomes if found.get(outcome.id.int, none)[0] == outcome.fence]
    return ours, [outcome.id for outcome in ours if found[outcome.id.int][1]]


def _still_ours(using: str, outcomes: list[Outcome]) -> list[Outcome]:
    if not outcomes:
        return []
    running = Job.objects.using(using).running()
    fences = dict(
        running.filter(pk__in=[outcome.id for outcome in outcomes]).values_list("pk", "fence")
    )
    return [outcome for outcome in outcomes if fences.get(outcome.id) == outcome.fence]


def _request(request: CancelRequest | None) -> dict[str, Any]:
    if request is None:
        return {"request": None}
    return {"request": request.reason, "kind": request.kind}


def _update(using: str, verdicts: list[Verdict]) -> None:
    connection = connections[using]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            rows = [_Row(*_row(verdict, connection)) for verdict in verdicts]
            cursor.execute(_POSTGRES, (msgspec.json.encode(rows).decode(),))
            return
        for verdict in verdicts:
            id, fence, state, attempt, after, finished, *rest = _row(verdict, connection)
            row = (state, attempt, after, finished, finished is None, *rest, id, fence)
            cursor.execute(_SQLITE, row)


class _Row(msgspec.Struct):
    """What is written to a job's row, for `json_to_recordset`."""

    id: str
    fence: int
    state: str
    attempt: int
    run_after: dt.datetime | None
    finished_at: dt.datetime | None
    result: str | None
    errors: str | None
    reason: str
    kind: str
    progress: float | None
    note: str | None


def _row(verdict: Verdict, connection: Any) -> tuple[Any, ...]:
    outcome = verdict.outcome
    fraction, note = outcome.progress or (None, None)
    changed = verdict.errors is not outcome.errors
    return (
        f"{outcome.id.int:032x}",
        outcome.fence,
        verdict.state.value,
        verdict.attempt,
        None if verdict.run_after is None else stored(verdict.run_after, connection),
        stored(outcome.at, connection) if verdict.finished else None,
        outcome.result if verdict.state is JobState.COMPLETED else None,
        msgspec.json.encode(verdict.errors).decode() if changed else None,
        verdict.reason,
        verdict.kind,
        fraction,
        note,
    )
