"""The worker: claims jobs, starts their handlers, hears of cancels, and ends in good order.

Who runs where, each with a database connection of its own:

    main thread    this module: cancel requests, claims, signals
    heartbeat      lease.py: renews the lease, and nothing else
    starter        begins.py: counts the attempts, and starts the handlers
    completer      completer.py: outcomes, progress, the feed
    relayer        relayer.py: records from the outbox into the queues' streams (PostgreSQL)
    housekeeper    housekeeping.py: due jobs, other workers' lost leases, retention
    job threads    attempts.py, handlers.py in pools.py: sync handlers; async ones on a loop;
                   each waits for one in a process (process_pool.py), if its task says so

The main thread wakes when a queue is notified, when a handler ends, on a signal, and by
the clock. Whatever woke it, it does the same: read the cancel requests of what runs,
then claim as many jobs as there is room for.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from django.db import DatabaseError, InterfaceError, connections, router

from .. import engine
from ..conf import current
from ..core.names import queue_wake_group
from ..core.shares import Shares
from ..exceptions import WorkerError
from ..models import sql
from ..models.each import Rests
from ..models.job import Job
from ..models.times import now
from . import draining
from .announcing import announcer
from .attempts import CANCEL_INTERVAL, Attempts
from .claims import ClaimedJob, Claims
from .completer import Completer
from .connections import Persistent, service_connection
from .housekeeping import Housekeeper
from .lease import Lease
from .memory import check_at_start, resident_bytes
from .outcomes import Ending, Outcome
from .process_pool import ProcessPool, cpus
from .relayer import Relayer
from .running import Asked
from .stopping import stop_signals
from .wakeup import Wakeup
from .worker_options import WorkerOptions

logger = logging.getLogger("echomq.jobs")

DRAIN_INTERVAL = 0.05
WRITE_DEADLINE = 15.0
"""How long the end of a worker may take after the grace: to write what there is."""
RELAY_DEADLINE = 2.0
"""And to move its records into their streams, which another worker would do, too."""
SIGNALS_DEADLINE = 2.0
"""And for the receivers of the last jobs' signals."""


class Worker:
    """Runs once: `run()` returns when it was told to stop, or when its part is done.

    That is when nothing is left to do (`drain`), or after `max_jobs` or at `max_rss`.
    """

    def __init__(
        self, options: WorkerOptions, *, on_started: Callable[[str], object] | None = None
    ) -> None:
        self.options = options
        self.name = options.name or f"{socket.gethostname()}:{os.getpid()}"
        self.using = router.db_for_write(Job)
        self.left_behind = 0
        """Handlers that still ran when the grace was over. Their jobs were handed back."""
        self._on_started = on_started
        self._stop = Wakeup()
        self._claims = Claims(self.using)
        self._rests: Rests[str] = Rests()
        self._shares = Shares({queue: options.weights.get(queue, 1) for queue in options.queues})
        self._begun = 0
        self.spent = ""
        """After what it ended by itself (`max_jobs`, `max_rss`); empty if it didn't."""
        self._next_reconcile = 0.0
        self._waiter = engine.waiter(*(queue_wake_group(queue) for queue in options.queues))
        self._relayer = Relayer(self.using, options.queues, patience=options.patience)
        self._completer = Completer(
            self.using,
            patience=options.patience,
            on_ready=self._waiter.set,
            on_written=self._relayer.soon,
        )
        self._attempts = Attempts(
            self.using,
            self._completer,
            slots=options.concurrency,
            processes=ProcessPool(options.process_concurrency or cpus(), max_rss=options.max_rss),
            patience=options.patience,
            on_room=self._waiter.set,
            on_begun=self._relayer.soon,
        )
        self._housekeeper = Housekeeper(
            self.using,
            options.queues,
            interval=options.poll,
            patience=options.patience,
            on_ready=self._waiter.set,
        )
        self._lease = Lease(
            self.using,
            name=self.name,
            queues=list(options.queues),
            concurrency=options.concurrency,
            lease=options.lease,
            heartbeat=options.heartbeat,
            patience=options.patience,
            on_lost=partial(self._attempts.ask_all, Asked.LEASE_LOST),
        )

    def stop(self) -> None:
        """Stop gracefully, as a signal does. Safe from anywhere."""
        self._stop.close()
        self._waiter.set()

    def run(self) -> bool:
        """Work until told to stop; tell whether everything could be written at the end.

        Raises `WorkerError` when it can't begin.
        """
        service = service_connection(
            self.using, "worker", self._stop, patience=self.options.patience
        )
        with service as persistent, self._waiter, stop_signals(self.stop):
            self._start()
            try:
                if self._on_started:
                    self._on_started(self.name)
                self._work(persistent)
            finally:
                written = self._finish()
        return written

    def _start(self) -> None:
        check_at_start(self.options.max_rss)
        try:
            missing = sql.missing(connections[self.using])
            if missing:
                raise WorkerError(
                    f"The database lacks {', '.join(missing)}. Run: manage.py migrate"
                )
            self._lease.acquire()
        except (DatabaseError, InterfaceError) as error:
            reason = " ".join(str(error).split())
            raise WorkerError(f"The worker can't use the database: {reason}") from error
        self._relayer.start()
        self._completer.start()
        self._attempts.open()
        self._housekeeper.start()
        logger.info(
            "event=worker_started worker=%s queues=%s concurrency=%d",
            self.name,
            ",".join(self.options.queues),
            self.options.concurrency,
        )

    def _work(self, persistent: Persistent) -> None:
        while not self._stop.closed:
            self._waiter.clear()  # before looking: what comes meanwhile isn't lost
            hear = partial(self._attempts.hear_cancels, self._lease.id)
            persistent.attempt("read cancel requests", hear, default=None)
            self._attempts.give_back()
            persistent.attempt("reconcile", self._reconcile, default=None)
            taken = persistent.attempt("claim", self._claim, default=None)
            if taken is None:
                self._next_reconcile = 0.0  # it may have been committed, and its answer lost
                continue
            if self._is_spent() and not self._attempts:
                return
            if self.options.parent not in (None, os.getppid()):
                logger.error("event=supervisor_gone worker=%s", self.name)
                return
            if not taken.jobs and persistent.attempt("drain", self._is_drained, default=False):
                return
            self._waiter.wait(self._pause(taken))

    def _pause(self, taken: _Taken) -> float:
        if self.options.drain and not self._attempts:
            return DRAIN_INTERVAL
        full = taken.room > 0 and taken.jobs == taken.room
        if full and len(self._attempts) < self.options.concurrency:
            return 0.0  # there may be more, and a handler has ended meanwhile
        if not self._attempts:
            return self._rests.pause(self.options.poll)
        soonest = self._rests.pause(min(self.options.poll, CANCEL_INTERVAL))
        return max(0.0, min(soonest, self._attempts.next_hearing - time.monotonic()))

    def _claim(self) -> _Taken:
        room = self._attempts.room()
        if self.options.max_jobs is not None:
            room = min(room, self.options.max_jobs - self._begun)
        is_behind = self._completer.is_behind or announcer.is_behind
        if room < 1 or self._lease.in_doubt or self.spent or is_behind:
            return _Taken(0, 0)
        turn = self._shares.turn(room)
        count, short = 0, set()
        # Each queue its share first; then what is left over, to whoever has more.
        for queue, share in (*turn, *((queue, room) for queue, _ in turn)):
            limit = min(share, room - count)
            if limit and queue not in short:
                claimed = self._take(queue, limit)
                count += claimed
                if claimed < limit:
                    short.add(queue)
        return _Taken(count, room)

    def _take(self, queue: str, limit: int) -> int:
        """Claim jobs of a queue, unless that failed just now; return how many."""
        before = self._begun

        def take(_: Sequence[str]) -> None:
            self._begin(queue, limit)

        if not self._rests.for_each(self.using, [queue], take, doing="claim"):
            self._next_reconcile = 0.0  # it may have been committed
        return self._begun - before

    def _begin(self, queue: str, limit: int) -> None:
        """Claim jobs of a queue and have them begin."""
        generation = self._lease.generation
        claimed = self._claims.take(
            queue,
            worker_id=self._lease.id,
            worker_name=self.name,
            limit=limit,
            count_first=self._attempts.may_be_counted(),
        )
        added = []
        for job in claimed:
            attempt = self._attempts.add(job)
            added.append(attempt)
            self._begun += 1
            # After it was added: whoever lost the lease meanwhile either saw it or counted up.
            if self._lease.generation != generation:
                attempt.ask(Asked.LEASE_LOST, Asked.LEASE_LOST.value)
        if added:
            self._attempts.begin(added)

    def _is_spent(self) -> bool:
        """Tell whether this process has done its part; from then on it claims nothing."""
        if not self.spent:
            jobs, memory = self.options.max_jobs, self.options.max_rss
            if jobs is not None and self._begun >= jobs:
                self.spent = f"{self._begun} jobs"
            elif memory is not None and (used := resident_bytes()) > memory * 2**20:
                self.spent = f"{used // 2**20} MiB of memory"
            if self.spent:
                logger.info("event=worker_spent worker=%s after=%r", self.name, self.spent)
        return bool(self.spent)

    def _reconcile(self) -> None:
        """Hand back jobs that the database says are ours and that we never heard of.

        The connection may break when a claim is committed and its answer under way.
        """
        if time.monotonic() < self._next_reconcile:
            return
        known = self._attempts.ids() | self._completer.unwritten
        ours = Job.objects.using(self.using).running().filter(worker=self._lease.id)
        for job in ours.exclude(pk__in=known):
            logger.warning("event=unknown_claim_handed_back job=%s", job.pk)
            self._completer.put(
                Outcome(
                    id=job.pk,
                    queue=job.queue,
                    task_path=job.task_path,
                    fence=job.fence,
                    attempt=job.attempt if job.has_begun else job.attempt + 1,
                    max_attempts=job.max_attempts,
                    ending=Ending.HANDED_BACK,
                    begun=job.has_begun,
                    at=now(),
                    reason="the worker's connection broke when it claimed the job",
                    claimed=ClaimedJob.of(job),
                )
            )
        self._next_reconcile = time.monotonic() + self.options.lease

    def _is_drained(self) -> bool:
        if not self.options.drain or self._attempts or self._completer.unwritten:
            return False
        return draining.is_done(self.using, self.options.queues)

    def _finish(self) -> bool:
        """Stop: ask, wait for the grace, hand back, write. Tell whether all is written."""
        self._stop.close()
        logger.info("event=worker_stopping worker=%s running=%d", self.name, len(self._attempts))
        self._attempts.hand_back_waiting()
        self._attempts.ask_all(Asked.SHUTDOWN)
        deadline = time.monotonic() + self.options.grace
        while self._attempts and time.monotonic() < deadline:
            self._waiter.clear()
            if self._attempts:
                self._waiter.wait(min(CANCEL_INTERVAL, max(0.0, deadline - time.monotonic())))
        self.left_behind = self._attempts.hand_back()
        self._housekeeper.close(timeout=1.0)
        written = self._completer.close(timeout=WRITE_DEADLINE)
        self._relayer.close(timeout=RELAY_DEADLINE)
        announcer.close(timeout=SIGNALS_DEADLINE)
        self._release(written)
        self._attempts.close()
        engine.flush(current().FLUSH_DEADLINE)
        logger.info("event=worker_stopped worker=%s handed_back=%d", self.name, self.left_behind)
        return written

    def _release(self, written: bool) -> None:
        try:
            self._lease.release()
        except (DatabaseError, InterfaceError) as error:
            logger.warning("event=lease_not_released error=%s written=%s", error, written)


class _Taken(NamedTuple):
    """How many jobs one round of claims took, and for how many there was room."""

    jobs: int
    room: int
