"""The processes of a worker that run handlers: started when needed, kept, replaced when lost.

A thread that has a slot in the worker waits here for its job's handler: for a process, if all
are busy, and then for its end. One process' end is the end of one attempt.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from ..core.process_messages import Ended
from ..exceptions import ProcessLost
from ..models.times import now
from . import handlers
from .context import Report
from .handler_process import HandlerProcess
from .outcomes import Ending, Outcome
from .running import RunningJob

logger = logging.getLogger("echomq.jobs")

END = 5.0
"""Seconds that a process that was killed may take to be gone."""


class ProcessPool:
    """At most `limit` processes. Safe from any thread."""

    def __init__(self, limit: int, *, max_rss: int | None = None) -> None:
        """`max_rss`: one that holds more MiB after a handler is replaced."""
        self._limit = limit
        self._max_memory = None if max_rss is None else max_rss * 2**20
        self._changed = threading.Condition()
        self._idle: list[HandlerProcess] = []
        self._busy: set[HandlerProcess] = set()
        self._closed = False

    def run(self, job: RunningJob, report: Report) -> Outcome | None:
        """Run the attempt in a process; return its outcome, None if it has one already."""
        while (process := self._take(job)) is not None:
            try:
                ended = process.run(job, report)
            except BaseException as error:
                self._put_back(process, lost=True)
                if not isinstance(error, ProcessLost):
                    raise
                if process.was_idle:
                    continue
                # Killed when the job was handed back: that was no failure.
                return None if job.finished else handlers.broken(job, error)
            # First of all: what the handler returned counts, whatever becomes of the process.
            outcome = handlers.not_begun(job) if ended is None else _outcome(job, ended, report)
            self._put_back(process, lost=False, spent=self._is_spent(process, ended))
            return outcome
        return handlers.not_begun(job)

    def kill_busy(self) -> None:
        """End the handlers that still run, and wait until they have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            busy = list(self._busy)
        for process in busy:
            logger.warning("event=handler_process_killed pid=%d", process.pid)
            process.kill()
        for process in busy:
            process.reap(END)

    def close(self, timeout: float) -> None:
        """End all processes: the idle ones in good order, for at most `timeout` seconds."""
        self.kill_busy()
        with self._changed:
            idle, self._idle = self._idle, []
        deadline = time.monotonic() + timeout
        for process in idle:
            process.close()
        for process in idle:
            process.reap(max(0.0, deadline - time.monotonic()))

    def _take(self, job: RunningJob) -> HandlerProcess | None:
        """Return a process for this job alone; None if it is cancelled before there is one."""
        forget = job.token.on_cancel(self._tell)
        try:
            with self._changed:
                while not (job.token.cancelled or self._closed):
                    process = self._find()
                    if process is not None:
                        self._busy.add(process)
                        return process
                    self._changed.wait()
            return None
        finally:
            forget()

    def _find(self) -> HandlerProcess | None:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            process.close()
        if len(self._busy) >= self._limit:
            return None
        process = HandlerProcess()
        logger.info("event=handler_process_started pid=%d", process.pid)
        return process

    def _is_spent(self, process: HandlerProcess, ended: Ended | None) -> bool:
        if ended is None or self._max_memory is None or ended.memory <= self._max_memory:
            return False
        logger.info(
            "event=handler_process_spent pid=%d after='%d MiB of memory'",
            process.pid,
            ended.memory // 2**20,
        )
        return True

    def _put_back(self, process: HandlerProcess, *, lost: bool, spent: bool = False) -> None:
        with self._changed:
            self._busy.discard(process)
            keep = not (lost or spent or self._closed)
            if keep:
                self._idle.append(process)
            self._changed.notify_all()
        if not keep:
            process.close()
            if lost:
                process.kill()
            process.reap(END)

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify_all()


def cpus() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _outcome(job: RunningJob, ended: Ended, report: Report) -> Outcome | None:
    if ended.progress is not None and ended.progress != job.progress:
        report(*ended.progress)
    return job.finish(
        Ending[ended.ending],
        at=now(),
        result=ended.result,
        error=ended.error,
        reason=ended.reason,
        kind=ended.kind,
    )
