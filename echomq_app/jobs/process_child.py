"""The side of the process that runs handlers for a worker, one after the other.

    main thread    the handler: what wants the main thread (signals, some C libraries) works
    listener       reads orders, cancels the token, and sees that the worker is gone
    reporter       sends the newest progress, a few times a second

The process ends when the worker closes the link, or is gone: at once if a handler runs,
because nobody would take what it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import queue
import threading
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

from django.db import connections

from .. import engine
from ..conf import current
from ..core.process_messages import Begun, Cancel, Ended, Order, Progress, Run, decode_order, encode
from . import handlers
from .memory import resident_bytes
from .outcomes import Outcome
from .process_claim import unpack
from .running import Asked, RunningJob
from .wakeup import Wakeup

logger = logging.getLogger("echomq.jobs")

PROGRESS_INTERVAL = 0.1
LOOK = 1.0
"""Seconds between two looks whether the worker still is the parent: somebody that was forked
from it may hold the other end of the link."""
END = 5.0
"""Seconds that an idle process may take to end."""


class _Attempt(NamedTuple):
    number: int
    job: RunningJob


class ProcessChild:
    """Runs handlers for the worker at the other end of `link`."""

    def __init__(self, link: Connection[bytes, bytes], parent: int) -> None:
        self._link = link
        self._parent = parent
        self._sending = threading.Lock()
        self._attempts: queue.SimpleQueue[_Attempt | None] = queue.SimpleQueue()
        self._running: _Attempt | None = None
        self._reported = Wakeup()

    def serve(self) -> None:
        """Run what is ordered until the link is closed."""
        for run in (self._listen, self._report):
            threading.Thread(target=run, name=f"echomq{run.__name__}", daemon=True).start()
        while (attempt := self._attempts.get()) is not None:
            # In a context of its own each, as in a worker's thread.
            outcome = contextvars.Context().run(self._run, attempt)
            self._ended(attempt, outcome)
        connections.close_all()
        engine.flush(current().FLUSH_DEADLINE)

    def _run(self, attempt: _Attempt) -> Outcome | None:
        job = attempt.job
        try:
            if job.token.cancelled:
                return handlers.not_begun(job)
            call = handlers.prepare(job, partial(self._progress, attempt))
            if not isinstance(call, handlers.Call):
                return call
            if handlers.is_async(call):
                return asyncio.run(handlers.run_async(call))
            return handlers.run_sync(call)
        except BaseException as error:  # noqa: BLE001
            return handlers.broken(job, error)

    def _ended(self, attempt: _Attempt, outcome: Outcome | None) -> None:
        if outcome is None:
            raise RuntimeError(f"Attempt {attempt.number} has ended without an outcome.")
        ended = Ended(
            number=attempt.number,
            ending=outcome.ending.name,
            result=outcome.result,
            error=outcome.error,
            reason=outcome.reason,
            kind=outcome.kind,
            progress=attempt.job.progress,
            memory=resident_bytes(),
        )
        self._running = None
        self._send(ended)

    def _progress(self, attempt: _Attempt, fraction: float, note: str) -> None:
        attempt.job.progress = (fraction, note)
        self._reported.call()

    def _report(self) -> None:
        while True:
            self._reported.wait(None)
            attempt = self._running
            if attempt is not None and attempt.job.progress is not None:
                self._send(Progress(attempt.number, *attempt.job.progress))
            self._reported.pause(PROGRESS_INTERVAL)

    def _send(self, message: Begun | Progress | Ended) -> None:
        # A worker that is gone: the listener sees it, too.
        with self._sending, contextlib.suppress(OSError):
            self._link.send_bytes(encode(message))

    def _listen(self) -> None:
        try:
            while os.getppid() == self._parent:
                if self._link.poll(LOOK):
                    self._take(decode_order(self._link.recv_bytes()))
        except (EOFError, OSError):
            pass
        except BaseException:
            logger.exception("event=order_not_understood pid=%d", os.getpid())
        if self._running is None:
            self._attempts.put(None)
            time.sleep(END)  # a thread that a handler left behind may keep the process
        os._exit(1)

    def _take(self, order: Order) -> None:
        if isinstance(order, Run):
            self._send(Begun(order.number))
            attempt = _Attempt(order.number, RunningJob(unpack(order.job)))
            self._running = attempt
            self._attempts.put(attempt)
        elif isinstance(order, Cancel):
            running = self._running
            if running is not None and running.number == order.number:
                running.job.ask(Asked(order.who), order.reason, order.kind)
