"""Announces the end of a job, once it is committed: `task_finished`, and so the log line.

Django's own receiver of that signal logs a failure as an ERROR and a success as INFO. There is
one signal for each final state of a job, wherever it was reached: `transitions.settle` and
`cancelling` write all final states, and announce them here.

Receivers are a project's code. They never run in a service thread of a worker, which has a
private connection and must not wait: such a thread hands the ends to a thread of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import django
from django.db import close_old_connections, connections

from ..models.job import Job, JobState
from .connections import drop_open_transactions, in_service_thread
from .outcomes import Verdict
from .results import JobResult, result_of, result_of_end
from .tasks import backend_class
from .tasks_api import DEFAULT_TASK_BACKEND_ALIAS, task_finished

logger = logging.getLogger("echomq.jobs")
_tasks_logger = logging.getLogger("django.tasks" if django.VERSION >= (6, 0) else "django_tasks")
_thread = threading.local()
BACKLOG = 1_000
_A_REQUEST = 0.1
"""Seconds after which receivers' connections are treated as Django does after a request."""

End: TypeAlias = Callable[[], tuple[JobResult, BaseException | None]]
"""Makes the result that receivers get; and what made the job a failed one."""


class RecordedError(Exception):
    """Stands in the log for an exception of another process. Its text is the traceback."""


def ended(verdicts: Iterable[Verdict]) -> None:
    """Announce the ends of attempts that ended a job. Call it after the commit. Never raises."""
    _announce([partial(_by_attempt, verdict) for verdict in verdicts])


def cancelled(jobs: Iterable[Job]) -> None:
    """Announce that jobs were cancelled while they waited. After the commit. Never raises."""
    _announce([partial(_by_cancel, job) for job in jobs])


def send(signal: Any, sender: type[Any], result: JobResult) -> None:
    """Send one of Django's task signals. What a receiver raises is logged, and nothing else."""
    try:
        tell(signal, sender, result)
    except BaseException as error:  # not even SystemExit is the job's
        logger.exception("event=receiver_failed job=%s error=%r", result.id, error)


def tell(signal: Any, sender: type[Any], result: JobResult) -> Exception | None:
    """Send one of Django's task signals, log what receivers raise, and return the first of it."""
    failed: Exception | None = None
    for receiver, response in signal.send_robust(sender, task_result=result):
        if isinstance(response, Exception):
            failed = failed or response
            logger.error(
                "event=receiver_failed receiver=%r job=%s", receiver, result.id, exc_info=response
            )
    return failed


def _announce(ends: list[End]) -> None:
    if in_service_thread():
        announcer.put(ends)
        return
    for end in ends:
        _announce_one(end)


def _announce_one(end: End) -> None:
    try:
        result, error = end()
        sender = backend_class(result.backend)
    except Exception:
        logger.exception("event=announcement_failed")
        return
    before = getattr(_thread, "cancelled", False)  # a receiver may cancel another job
    _thread.cancelled = result.state == JobState.CANCELLED
    try:
        if error is None:
            send(task_finished, sender, result)
            return
        # Receivers log the current exception.
        try:
            raise error
        except BaseException:  # noqa: BLE001
            send(task_finished, sender, result)
    finally:
        _thread.cancelled = before


def _by_attempt(verdict: Verdict) -> tuple[JobResult, BaseException | None]:
    result, outcome = result_of_end(verdict), verdict.outcome
    if verdict.state is not JobState.FAILED or outcome.error is None:
        return result, None
    return result, outcome.exception or RecordedError(f"\n{outcome.error.get('traceback')}")


def _by_cancel(job: Job) -> tuple[JobResult, None]:
    return result_of(job, DEFAULT_TASK_BACKEND_ALIAS), None


class _CancelIsNoError(logging.Filter):
    """Lowers what Django logs about a cancelled job, whose status is FAILED, from ERROR to INFO."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.ERROR or not getattr(_thread, "cancelled", False):
            return True
        record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
        return _tasks_logger.isEnabledFor(logging.INFO)


_tasks_logger.addFilter(_CancelIsNoError())


class Announcer:
    """The thread in which receivers run, for a worker's service threads. Starts when needed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ends: deque[End] = deque()
        self._running = False
        self._closing = False

    @property
    def is_behind(self) -> bool:
        """Whether so many ends wait for their receivers that no more jobs should be claimed."""
        return len(self._ends) > BACKLOG

    def put(self, ends: Iterable[End]) -> None:
        """Announce these soon. Returns at once."""
        with self._changed:
            self._ends.extend(ends)
            if self._ends and not self._running:
                thread = threading.Thread(target=self._run, name="echomq-signals", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system gives no thread: perhaps with the next ends
                    logger.exception("event=announcement_delayed ends=%d", len(self._ends))
                    return
                self._running = True
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        """Announce what there is, for at most `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running, timeout)
            self._closing = False
            if self._ends:
                logger.warning("event=announcements_left count=%d", len(self._ends))

    def _run(self) -> None:
        closed_at = 0.0
        while (end := self._next()) is not None:
            try:
                _announce_one(end)
            except BaseException:  # the thread has to go on
                logger.exception("event=announcement_failed")
            with self._changed:
                self._ends.popleft()  # only now: until then it counts
            if not self._ends or time.monotonic() - closed_at > _A_REQUEST:
                close_old_connections()
                drop_open_transactions()
                closed_at = time.monotonic()

    def _next(self) -> End | None:
        """Wait for the next end; None when there is none and the thread should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._ends or self._closing)
            if self._ends:
                return self._ends[0]
            connections.close_all()
            self._running = False
            self._changed.notify_all()
            return None


announcer = Announcer()
