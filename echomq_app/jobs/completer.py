"""Writes how attempts ended, and everything else that a job's thread must not wait for.

Called by: the handlers' threads (`put`, `report`), which never wait here. Its own
thread writes what has come together meanwhile in one transaction: an idle completer
writes at once, a busy one in batches that grow with the load. After each batch it publishes
on the feed, and says that there are records to relay.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from django.db import DatabaseError, OperationalError, connections

from ..core.ids import JobId
from ..models.job import JobState
from ..models.times import now
from . import journal
from .connections import Persistent, service_connection
from .journal import Entry
from .outcomes import Ending, Outcome, error_record
from .running import RunningJob
from .transitions import Settlement, settle, write_progress
from .wakeup import Wakeup

logger = logging.getLogger("echomq.jobs")

BATCH = 500
PROGRESS_INTERVAL = 0.25
BACKLOG = 2 * BATCH
"""Outcomes that may wait before no more jobs are claimed: all of them would be run once more
after a crash."""
IDLE = 1.0
UNSTORABLE = (DatabaseError, TypeError, ValueError, OverflowError, RecursionError)
"""What an outcome that can't be stored may raise: in the database, or on its way to JSON."""
LOCKED_PAUSE = 0.2
"""Before a row that somebody else holds is tried again."""


class Completer:
    """One thread with one connection; see the module."""

    def __init__(
        self,
        using: str,
        *,
        patience: float,
        on_ready: Callable[[], object],
        on_written: Callable[[], object],
    ) -> None:
        """`on_ready()` is called when a job may be claimed: one that ran, one of its group, or
        any, when there had been too many outcomes; `on_written()` when there are records.
        """
        self._using = using
        self._patience = patience
        self._on_ready = on_ready
        self._on_written = on_written
        self._wakeup = Wakeup()
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._reports: dict[JobId, tuple[RunningJob, float, str]] = {}
        self._waiting: list[Outcome] = []
        self._locked: list[tuple[float, Outcome]] = []
        self._unwritten: set[JobId] = set()
        self._written: dict[tuple[JobId, int], Callable[[], object]] = {}
        self._next_progress = 0.0
        self._thread = threading.Thread(target=self._run, name="echomq-completer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, outcome: Outcome, on_written: Callable[[], object] | None = None) -> None:
        """Have an outcome written. Returns at once.

        `on_written()` is called when it is, or when that has to wait for another transaction's
        lock.
        """
        with self._lock:
            self._unwritten.add(outcome.id)
            if on_written is not None:
                self._written[outcome.id, outcome.fence] = on_written
        self._outcomes.put(outcome)
        self._wakeup.call()

    def report(self, job: RunningJob, fraction: float, note: str) -> None:
        """Have a job's progress written and published; only the newest counts."""
        job.progress = (fraction, note)
        with self._lock:
            first = not self._reports
            self._reports[job.claimed.id] = (job, fraction, note)
        if first:
            self._wakeup.call()

    @property
    def unwritten(self) -> set[JobId]:
        """Jobs whose outcome is here and not in the database yet."""
        with self._lock:
            return set(self._unwritten)

    @property
    def is_behind(self) -> bool:
        """Whether more outcomes wait to be written than should."""
        return len(self._unwritten) > BACKLOG

    def close(self, timeout: float) -> bool:
        """Write what there is, for at most `timeout` seconds; tell whether all is written."""
        deadline = time.monotonic() + timeout
        while self.unwritten and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.005)
        self._wakeup.close()
        self._thread.join(max(0.0, deadline - time.monotonic()) + 1.0)
        return not self.unwritten

    def _run(self) -> None:
        service = service_connection(
            self._using, "completer", self._wakeup, patience=self._patience
        )
        with service as persistent:
            # Now, not with the first outcome: what a worker needs it has from the beginning.
            connect = connections[self._using].ensure_connection
            persistent.attempt("connect", connect, default=None)
            while not self._wakeup.closed:
                self._turn(persistent)
                self._wakeup.wait(self._pause())
            self._turn(persistent)

    def _turn(self, persistent: Persistent) -> None:
        self._collect()
        while self._waiting:
            batch = self._waiting[:BATCH]
            if not persistent.attempt("settle", partial(self._write, batch), default=False):
                break
            del self._waiting[: len(batch)]
            self._on_written()
            self._collect()
        now_is = time.monotonic()
        if now_is >= self._next_progress:
            self._next_progress = now_is + PROGRESS_INTERVAL
            persistent.attempt("progress", self._write_progress, default=None)

    def _pause(self) -> float:
        now_is = time.monotonic()
        moments = [now_is + IDLE, *(moment for moment, _ in self._locked)]
        if self._reports:
            moments.append(self._next_progress)
        if self._waiting:
            moments.append(now_is)
        return max(0.0, min(moments) - now_is)

    def _collect(self) -> None:
        """Take what was put, and the rows whose pause is over."""
        while True:
            try:
                self._waiting.append(self._outcomes.get_nowait())
            except queue.Empty:
                break
        now_is = time.monotonic()
        self._waiting += [outcome for moment, outcome in self._locked if moment <= now_is]
        self._locked = [entry for entry in self._locked if entry[0] > now_is]

    def _write(self, batch: list[Outcome]) -> bool:
        try:
            self._settled(batch, settle(self._using, batch))
        except OperationalError:
            raise
        except UNSTORABLE:
            # One of them can't be stored: the others go on.
            for outcome in batch:
                self._write_alone(outcome)
        return True

    def _write_alone(self, outcome: Outcome) -> None:
        """Write one outcome, or that it couldn't be stored: recording can't fail."""
        try:
            settlement = settle(self._using, [outcome])
        except OperationalError:
            raise
        except UNSTORABLE as error:
            logger.exception("event=outcome_not_storable job=%s", outcome.id)
            record = error_record(error, attempt=outcome.attempt, worker="", at=now())
            # What has returned, or has stopped, is not run again because of what it says.
            returned = outcome.ending is Ending.RETURNED
            substitute = dataclasses.replace(
                outcome,
                ending=Ending.UNSTORABLE if returned else outcome.ending,
                result=None,
                error=record,
                exception=error,
                errors=[],
                reason=None,
                progress=None,
            )
            settlement = settle(self._using, [substitute])
        self._settled([outcome], settlement)

    def _settled(self, batch: list[Outcome], settlement: Settlement) -> None:
        for outcome in settlement.lost:
            logger.warning(
                "event=outcome_dropped job=%s fence=%d ending=%s reason=claimed_by_another",
                outcome.id,
                outcome.fence,
                outcome.ending.name.lower(),
            )
        again = time.monotonic() + LOCKED_PAUSE
        self._locked += [(again, outcome) for outcome in settlement.later]
        kept = {outcome.id for outcome in settlement.later}
        was_behind = self.is_behind
        with self._lock:
            self._unwritten -= {outcome.id for outcome in batch} - kept
            reports = [
                self._reports.pop(entry.job_id)
                for entry in settlement.entries
                if entry.job_id in self._reports
            ]
            written = [
                self._written.pop((outcome.id, outcome.fence))
                for outcome in batch
                if (outcome.id, outcome.fence) in self._written
            ]
        for call in written:
            call()
        journal.publish([*(progress_entry(*report) for report in reports), *settlement.entries])
        caught_up = was_behind and not self.is_behind
        if settlement.ready or caught_up or any(map(_makes_room, batch)):
            self._on_ready()

    def _write_progress(self) -> None:
        with self._lock:
            taken, self._reports = self._reports, {}
        reports = [report for report in taken.values() if not report[0].finished]
        if not reports:
            return
        try:
            write_progress(
                self._using,
                [(job.claimed.id, job.claimed.fence, part, note) for job, part, note in reports],
            )
        finally:
            journal.publish(progress_entry(*report) for report in reports)


def progress_entry(job: RunningJob, fraction: float, note: str) -> Entry:
    """Say how far a job is; for the feed alone."""
    claimed = job.claimed
    data: dict[str, Any] = {
        "id": str(claimed.id),
        "task": claimed.task_path,
        "state": JobState.RUNNING.value,
        "attempt": claimed.attempt,
        "at": journal.timestamp(now()),
        "fraction": fraction,
        "note": note,
    }
    return Entry(claimed.queue, journal.PROGRESS, claimed.id, data)


def _makes_room(outcome: Outcome) -> bool:
    """Tell whether a parked job of the same group may be waiting for this end."""
    return "group" in outcome.options or "concurrency" in outcome.options
