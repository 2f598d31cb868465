"""Write how attempts ended: many jobs in one transaction, each only if it is still ours.

Two rules keep it from ever waiting for somebody else's transaction. Rows are locked in
id order and rows that are locked already are passed over (they come back as `later`);
and the job rows come first, the queue's stream last, which on PostgreSQL is only the
outbox. A row whose fence or state is another one isn't ours any more: `lost`.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from django.db import connections, transaction

from ..core.ids import JobId
from ..models.job import CancelRequest, Job, JobState
from ..models.times import now, stored
from . import journal
from .journal import Entry
from .outcomes import Outcome, Verdict, decide

_POSTGRES = (
    "UPDATE echomq_job AS j SET state = v.state, attempt = v.attempt,"
    " run_after = coalesce(v.run_after, j.run_after), finished_at = v.finished_at,"
    " worker_id = CASE WHEN v.finished_at IS NULL THEN NULL ELSE j.worker_id END,"
    " result = v.result::jsonb, errors = coalesce(v.errors::jsonb, j.errors),"
    " cancel_reason = v.reason, progress = coalesce(v.progress, j.progress),"
    " progress_note = coalesce(v.note, j.progress_note)"
    " FROM unnest(%s::uuid[], %s::bigint[], %s::text[], %s::integer[], %s::timestamptz[],"
    " %s::timestamptz[], %s::text[], %s::text[], %s::text[], %s::float8[], %s::text[])"
    " AS v(id, fence, state, attempt, run_after, finished_at, result, errors, reason,"
    " progress, note)"
    " WHERE j.id = v.id AND j.fence = v.fence AND j.state = 'running'"
)
_SQLITE = (
    "UPDATE echomq_job SET state = %s, attempt = %s, run_after = coalesce(%s, run_after),"
    " finished_at = %s, worker_id = CASE WHEN %s THEN NULL ELSE worker_id END, result = %s,"
    " errors = coalesce(%s, errors), cancel_reason = %s, progress = coalesce(%s, progress),"
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """What came of a batch of outcomes."""

    entries: list[Entry]
    """Committed, to be published."""
    later: list[Outcome]
    """Still ours, but somebody holds the row: try again."""
    lost: list[Outcome]
    """Not ours any more (or already written): nothing to do."""


def settle(using: str, outcomes: Iterable[Outcome]) -> Settlement:
    """Write outcomes in a transaction of their own; the first one of a job counts.

    Raises what the database raises; then nothing was written.
    """
    by_id: dict[JobId, Outcome] = {}
    for outcome in outcomes:
        by_id.setdefault(outcome.id, outcome)
    if not by_id:
        return Settlement(entries=[], later=[], lost=[])
    with transaction.atomic(using=using):
        ours = _lock(using, list(by_id.values()))
        requests = CancelRequest.objects.using(using).for_jobs(outcome.id for outcome in ours)
        at = now()
        verdicts = [
            decide(outcome, request=_reason(requests.get(outcome.id)), now=at) for outcome in ours
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
    lost = [outcome for outcome in rest if outcome not in later]
    return Settlement(entries=entries, later=later, lost=lost)


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


def _lock(using: str, outcomes: list[Outcome]) -> list[Outcome]:
    """Lock the rows that are ours and free, in id order; return their outcomes."""
    ids = [outcome.id for outcome in outcomes]
    running = Job.objects.using(using).running().filter(pk__in=ids).order_by("pk")
    if connections[using].features.has_select_for_update_skip_locked:
        running = running.skip_locked()
    fences = dict(running.values_list("pk", "fence"))
    return [outcome for outcome in outcomes if fences.get(outcome.id) == outcome.fence]


def _still_ours(using: str, outcomes: list[Outcome]) -> list[Outcome]:
    if not outcomes:
        return []
    running = Job.objects.using(using).running()
    fences = dict(
        running.filter(pk__in=[outcome.id for outcome in outcomes]).values_list("pk", "fence")
    )
    return [outcome for outcome in outcomes if fences.get(outcome.id) == outcome.fence]


def _reason(request: CancelRequest | None) -> str | None:
    return None if request is None else request.reason


def _update(using: str, verdicts: list[Verdict]) -> None:
    connection = connections[using]
    rows = [_row(verdict, connection) for verdict in verdicts]
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.executemany(
                _SQLITE,
                [
                    (state, attempt, after, finished, finished is None, *rest, id, fence)
                    for id, fence, state, attempt, after, finished, *rest in rows
                ],
            )
            return
        cursor.execute(_POSTGRES, tuple(list(column) for column in zip(*rows, strict=True)))


def _row(verdict: Verdict, connection: Any) -> tuple[Any, ...]:
    outcome = verdict.outcome
    fraction, note = outcome.progress or (None, None)
    changed = verdict.errors is not outcome.errors
    return (
        uuid.UUID(int=outcome.id.int).hex,
        outcome.fence,
        verdict.state.value,
        verdict.attempt,
        None if verdict.run_after is None else stored(verdict.run_after, connection),
        stored(outcome.at, connection) if verdict.finished else None,
        outcome.result if verdict.state is JobState.COMPLETED else None,
        msgspec.json.encode(verdict.errors).decode() if changed else None,
        verdict.reason,
        fraction,
        note,
    )
