"""The attempts that run in this process: begin them, ask them to stop, see them end.

Called by the main thread (`begin`, `hear_cancels`, `ask_all`), by the heartbeat when the
lease is lost (`ask_all`), and by the handlers' threads, which end here. What is claimed
ahead waits in a buffer until the starter has counted its attempt (`begins.py`), and a thread
that has done with one job goes on with the next.
"""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.prefetch import STALE, Prefetch
from ..models.job import CancelRequest
from ..models.times import now
from . import handlers
from .begins import Starter, publish
from .buffer import Buffer
from .claims import ClaimedJob
from .completer import Completer
from .outcomes import Ending, Outcome
from .pools import LoopThread, ThreadPool
from .process_pool import ProcessPool
from .running import Asked, RunningJob

logger = logging.getLogger("echomq.jobs")

CANCEL_INTERVAL = 0.5
"""How often cancel requests are read while anything runs, whatever the poll interval."""
REST = 1.0
"""Seconds without claims when the system gave no thread for a handler."""
STARTER_END = 1.0
"""Seconds that the start of handlers which is under way may take at the end."""
PROCESSES_END = 3.0
"""Seconds that idle processes for handlers may take to end."""
HEARING_GAP = 0.02
"""Not more often than this, however often the main thread wakes."""


class Attempts:
    """What runs, and what waits for a slot to run in. Its length is how many in all.

    Safe from any thread.
    """

    def __init__(
        self,
        using: str,
        completer: Completer,
        *,
        slots: int,
        processes: ProcessPool,
        patience: float,
        on_room: Callable[[], object],
        on_begun: Callable[[], object],
    ) -> None:
        """`slots`: how many handlers run at once. `on_room()`: it is time to claim more.
        `on_begun()`: there are records of starts.
        """
        self._using = using
        self._completer = completer
        self._slots = slots
        self._on_room = on_room
        self._buffer = Buffer(slots)
        self._prefetch = Prefetch()
        self._low = 0
        self._room_told = False
        # By fence too: a job may come back while its old handler still runs here.
        self._running: dict[tuple[Any, int], RunningJob] = {}
        self._threads = ThreadPool("echomq-job")
        self._loop = LoopThread("echomq-async-jobs")
        self._processes = processes
        self._starter = Starter(
            using,
            self._buffer,
            patience=patience,
            start=self._start,
            release=self._give_up,
            fail=self._fail,
            on_begun=on_begun,
        )
        self._on_begun = on_begun
        self._rests_until = 0.0
        self.next_hearing = 0.0

    def open(self) -> None:
        """Begin what is added from now on."""
        self._starter.open()

    def __len__(self) -> int:
        return len(self._running)

    def ids(self) -> set[Any]:
        """Return the ids of what runs."""
        return {id for id, _ in list(self._running)}

    def room(self) -> int:
        """Return how many jobs to claim now. From here on, `on_room` is called anew."""
        if time.monotonic() < self._rests_until:
            return 0
        ahead = self._prefetch.ahead(self._buffer.begun, time.monotonic())
        self._low = ahead // 2
        self._buffer.ahead = self._prefetch.counted_ahead()
        self._room_told = False
        return self._slots + ahead - len(self._running)

    def may_be_counted(self) -> int:
        """Return how many jobs a claim may count as begun."""
        return self._buffer.may_be_counted()

    def add(self, claimed: ClaimedJob) -> RunningJob:
        """Have a job that was claimed wait for a slot; `begin` follows."""
        job = RunningJob(claimed)
        self._running[claimed.id, claimed.fence] = job
        self._buffer.add(job)
        return job

    def begin(self, added: list[RunningJob]) -> None:
        """Start the handlers of what was added, as far as there are slots."""
        counted = [job for job in added if job.claimed.has_begun]
        if counted:
            publish(counted)
            self._on_begun()
        self._starter.wake()

    def give_back(self) -> None:
        """Hand back what has waited for longer than `STALE`: others may have a slot for it."""
        stale = self._buffer.take(older_than=STALE)
        if stale:
            self._prefetch.forget()
            self._give_up(stale, "it waited too long for a handler")

    def ask_all(self, who: Asked) -> None:
        """Cancel every token, with `who` as the reason."""
        for job in list(self._running.values()):
            job.ask(who, who.value)

    def hear_cancels(self, worker_id: int) -> None:
        """Read the cancel requests for what runs, unless that was done just now."""
        now_is = time.monotonic()
        if not self._running or now_is < self.next_hearing - CANCEL_INTERVAL + HEARING_GAP:
            return
        # By the worker: what waits for a handler may be hundreds, and requests are few.
        requests = CancelRequest.objects.using(self._using).for_worker(worker_id)
        self.next_hearing = now_is + CANCEL_INTERVAL
        if not requests:
            return
        for job in list(self._running.values()):
            request = requests.get(job.claimed.id)
            if request is not None and job.asked is None:
                job.ask(Asked.CANCEL, request.reason or None, request.kind)

    def hand_back_waiting(self) -> None:
        """Hand back what has not begun; nothing begins from now on."""
        self._starter.close(timeout=STARTER_END)
        self._give_up(self._buffer.take_all(), Asked.SHUTDOWN.value)

    def hand_back(self) -> int:
        """Give up what still runs: its jobs go back to the queue. Return how many."""
        given_up = []
        for job in list(self._running.values()):
            outcome = job.finish(Ending.HANDED_BACK, at=now(), reason=Asked.SHUTDOWN.value)
            if outcome is not None:
                given_up.append(outcome)
        # Before anybody can claim the jobs again. (Threads can't be ended.)
        self._processes.kill_busy()
        for outcome in given_up:
            self._completer.put(outcome)
        return len(given_up)

    def close(self) -> None:
        """Let the threads go that have nothing to do."""
        self._threads.close()
        self._loop.close(timeout=1.0)
        self._processes.close(timeout=PROCESSES_END)

    def _give_up(self, waiting: list[RunningJob], reason: str) -> None:
        for job in waiting:
            self._ended(job, job.finish(Ending.HANDED_BACK, at=now(), reason=reason))

    def _fail(self, job: RunningJob, error: Exception) -> None:
        self._ended(job, handlers.broken(job, error))

    def _start(self, job: RunningJob) -> None:
        try:
            self._threads.submit(partial(self._work, job))
        except RuntimeError as error:  # another worker may have a thread for it
            logger.error("event=no_thread job=%s error=%s", job.claimed.id, error)
            self._rests_until = time.monotonic() + REST
            self._buffer.give_up_slot()
            self._give_up([job], "there was no thread for its handler")

    def _work(self, job: RunningJob | None) -> None:
        """Run one job after the other, in a thread, as long as there are any."""
        # In a context of its own each: nothing that one job activates (a language, a time
        # zone) is seen by the next.
        while job is not None and contextvars.Context().run(self._run, job):
            job = self._following()

    def _go_on(self) -> None:
        """Use a slot that is free for the next job."""
        following = self._following()
        if following is not None:
            self._start(following)

    def _following(self) -> RunningJob | None:
        """Return the job that goes on in this slot."""
        job = self._buffer.next()
        if self._buffer.wants_more:
            self._starter.wake()
        if len(self._buffer) <= self._low and not self._room_told:
            self._room_told = True
            self._on_room()
        return job

    def _run(self, job: RunningJob) -> bool:
        """Run the attempt, in a job's thread; tell whether its slot is free when this returns.

        Else it goes on on the loop, or its outcome has to be written first. It ends, whatever
        happens: its lease is renewed.
        """
        outcome: Outcome | None
        report = partial(self._completer.report, job)
        try:
            if job.token.cancelled:  # before it has begun: then it doesn't
                outcome = handlers.not_begun(job)
            elif "process" in job.claimed.options:
                outcome = self._processes.run(job, report)
            else:
                call = handlers.prepare(job, report)
                if isinstance(call, handlers.Call):
                    if handlers.is_async(call):
                        self._loop.submit(partial(self._run_async, job, call))
                        return False
                    outcome = handlers.run_sync(call)
                else:
                    outcome = call
        except BaseException as error:  # noqa: BLE001
            outcome = handlers.broken(job, error)
        return self._ended(job, outcome)

    async def _run_async(self, job: RunningJob, call: handlers.Call) -> None:
        try:
            outcome = await handlers.run_async(call)
        except BaseException as error:  # noqa: BLE001
            outcome = handlers.broken(job, error)
        if self._ended(job, outcome):
            self._go_on()

    def _ended(self, job: RunningJob, outcome: Outcome | None) -> bool:
        """Have the outcome written; tell whether the slot is free now.

        After a last attempt it is when the outcome is written: what runs next may kill the
        process, and this job couldn't be run again.
        """
        waits = outcome is not None and job.begun and job.is_last
        if outcome is not None:
            self._completer.put(outcome, self._go_on if waits else None)
        # After `put`: at every moment the job is known here or there.
        self._running.pop((job.claimed.id, job.claimed.fence), None)
        return not waits
