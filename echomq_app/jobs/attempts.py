"""The attempts that run in this process: begin them, ask them to stop, see them end.

Called by the main thread (`begin`, `hear_cancels`, `ask_all`), by the heartbeat when the
lease is lost (`ask_all`), and by the handlers' threads, which end here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..models.job import CancelRequest
from ..models.times import now
from . import handlers
from .claims import ClaimedJob
from .completer import Completer
from .outcomes import Ending, Outcome
from .pools import LoopThread, ThreadPool
from .running import Asked, RunningJob

CANCEL_INTERVAL = 0.5
"""How often cancel requests are read while anything runs, whatever the poll interval."""
HEARING_GAP = 0.02
"""Not more often than this, however often the main thread wakes."""


class Attempts:
    """What runs. Its length is how many; safe from any thread."""

    def __init__(self, using: str, completer: Completer, *, on_end: Callable[[], object]) -> None:
        self._using = using
        self._completer = completer
        self._on_end = on_end
        # By fence too: a job may come back while its old handler still runs here.
        self._running: dict[tuple[Any, int], RunningJob] = {}
        self._threads = ThreadPool("echomq-job")
        self._loop = LoopThread("echomq-async-jobs")
        self.next_hearing = 0.0

    def __len__(self) -> int:
        return len(self._running)

    def ids(self) -> set[Any]:
        """Return the ids of what runs."""
        return {id for id, _ in list(self._running)}

    def begin(self, claimed: ClaimedJob) -> RunningJob:
        """Start the handler of a job that was claimed."""
        job = RunningJob(claimed)
        self._running[claimed.id, claimed.fence] = job
        try:
            self._threads.submit(partial(self._run, job))
        except BaseException:  # no more threads: a job that we don't know is handed back
            del self._running[claimed.id, claimed.fence]
            raise
        return job

    def ask_all(self, who: Asked) -> None:
        """Cancel every token, with `who` as the reason."""
        for job in list(self._running.values()):
            job.ask(who, who.value)

    def hear_cancels(self) -> None:
        """Read the cancel requests for what runs, unless that was done just now."""
        listening = [job for job in list(self._running.values()) if job.asked is None]
        now_is = time.monotonic()
        if not listening or now_is < self.next_hearing - CANCEL_INTERVAL + HEARING_GAP:
            return
        requests = CancelRequest.objects.using(self._using).for_jobs(
            job.claimed.id for job in listening
        )
        self.next_hearing = now_is + CANCEL_INTERVAL
        for job in listening:
            request = requests.get(job.claimed.id)
            if request is not None:
                job.ask(Asked.CANCEL, request.reason or None)

    def hand_back(self) -> int:
        """Give up what still runs: its jobs go back to the queue. Return how many."""
        given_up = 0
        for job in list(self._running.values()):
            outcome = job.finish(Ending.HANDED_BACK, at=now(), reason=Asked.SHUTDOWN.value)
            if outcome is not None:
                given_up += 1
                self._completer.put(outcome)
        return given_up

    def close(self) -> None:
        """Let the threads go that have nothing to do."""
        self._threads.close()
        self._loop.close(timeout=1.0)

    def _run(self, job: RunningJob) -> None:
        """Run the attempt, in a job's thread. It ends, whatever happens: its lease is renewed."""
        outcome: Outcome | None
        try:
            if job.token.cancelled:  # before it has begun: then it doesn't
                outcome = job.finish(Ending.STOPPED, at=now(), reason=job.token.reason)
            else:
                call = handlers.prepare(job, partial(self._completer.report, job))
                if isinstance(call, handlers.Call):
                    if handlers.is_async(call):
                        self._loop.submit(partial(self._run_async, job, call))
                        return
                    outcome = handlers.run_sync(call)
                else:
                    outcome = call
        except BaseException as error:  # noqa: BLE001
            outcome = handlers.broken(job, error)
        self._ended(job, outcome)

    async def _run_async(self, job: RunningJob, call: handlers.Call) -> None:
        try:
            outcome = await handlers.run_async(call)
        except BaseException as error:  # noqa: BLE001
            outcome = handlers.broken(job, error)
        self._ended(job, outcome)

    def _ended(self, job: RunningJob, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._completer.put(outcome)
        # After `put`: at every moment the job is known here or there.
        self._running.pop((job.claimed.id, job.claimed.fence), None)
        self._on_end()
