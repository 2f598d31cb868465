"""The attempts that run in this process: begin them, ask them to stop, see them end.

Called by the main thread (`begin`, `hear_cancels`, `ask_all`), by the heartbeat when the
lease is lost (`ask_all`), and by the handlers' threads, which end here. What is claimed
ahead waits in a buffer, and a thread that has done with one job goes on with the next.
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.prefetch import STALE, Prefetch
from ..models.job import CancelRequest
from ..models.times import now
from . import handlers
from .buffer import Buffer
from .claims import ClaimedJob
from .completer import Completer
from .outcomes import Ending, Outcome
from .pools import LoopThread, ThreadPool
from .process_pool import ProcessPool
from .running import Asked, RunningJob

CANCEL_INTERVAL = 0.5
"""How often cancel requests are read while anything runs, whatever the poll interval."""
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
        on_room: Callable[[], object],
    ) -> None:
        """`slots`: how many handlers run at once. `on_room()`: it is time to claim more."""
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
        self.next_hearing = 0.0

    def __len__(self) -> int:
        return len(self._running)

    def ids(self) -> set[Any]:
        """Return the ids of what runs."""
        return {id for id, _ in list(self._running)}

    def room(self) -> int:
        """Return how many jobs to claim now. From here on, `on_room` is called anew."""
        ahead = self._prefetch.ahead(self._buffer.begun, time.monotonic())
        self._low = ahead // 2
        self._room_told = False
        return self._slots + ahead - len(self._running)

    def begin(self, claimed: ClaimedJob) -> RunningJob:
        """Start the handler of a job that was claimed, or have it wait for a slot."""
        job = RunningJob(claimed)
        self._running[claimed.id, claimed.fence] = job
        self._buffer.add(job)
        following = self._buffer.start()
        if following is not None:
            self._start(following)
        return job

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
        """Hand back what has not begun."""
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

    def _start(self, job: RunningJob) -> None:
        try:
            self._threads.submit(partial(self._work, job))
        except BaseException:  # no more threads: it waits, until it is given back
            self._buffer.put_back(job)
            raise

    def _work(self, job: RunningJob | None) -> None:
        """Run one job after the other, in a thread, as long as there are any."""
        # In a context of its own each: nothing that one job activates (a language, a time
        # zone) is seen by the next.
        while job is not None and contextvars.Context().run(self._run, job):
            job = self._following()

    def _following(self) -> RunningJob | None:
        """Return the job that goes on in this slot."""
        job = self._buffer.next()
        if len(self._buffer) <= self._low and not self._room_told:
            self._room_told = True
            self._on_room()
        return job

    def _run(self, job: RunningJob) -> bool:
        """Run the attempt, in a job's thread; tell whether it has ended, or goes on on the loop.

        It ends, whatever happens: its lease is renewed.
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
        self._ended(job, outcome)
        return True

    async def _run_async(self, job: RunningJob, call: handlers.Call) -> None:
        try:
            outcome = await handlers.run_async(call)
        except BaseException as error:  # noqa: BLE001
            outcome = handlers.broken(job, error)
        self._ended(job, outcome)
        following = self._following()
        if following is not None:
            self._start(following)

    def _ended(self, job: RunningJob, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._completer.put(outcome)
        # After `put`: at every moment the job is known here or there.
        self._running.pop((job.claimed.id, job.claimed.fence), None)
