"""Jobs against a small model: whatever workers, users and accidents do, in any order.

The real functions on the real database, in one thread, one step at a time: so every order
of steps can be had again. Time passes by moving what is stored into the past. On PostgreSQL
other sessions hold rows, and cancel in transactions that stay open, between any two steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.db.models import F
from django.utils import timezone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from echomq_app.core.ids import JobId
from echomq_app.jobs import control
from echomq_app.jobs.begins import begin
from echomq_app.jobs.claims import Claims
from echomq_app.jobs.housekeeping import promote, rescue, sweep
from echomq_app.jobs.outcomes import Ending, Outcome
from echomq_app.jobs.running import RunningJob
from echomq_app.jobs.transitions import settle, write_progress
from echomq_app.models import CancelRequest, Job, Worker
from echomq_app.stream import Stream
from tests import jobtasks
from tests.databases import session
from tests.integration.jobs import USING, outcome
from tests.job_model import LETTERS, TERMINAL_RECORDS, ModelJob, ModelLease

pytestmark = pytest.mark.django_db(transaction=True)

SLOTS = 3
LEASE = 3_000.0
"""Seconds. Model time goes in steps so large that a slow machine changes nothing."""
STEPS = st.sampled_from([0.5, 2_000.0, 5_000.0])
SLOT = st.integers(0, SLOTS - 1)
PICK = st.integers(0, 10_000)
"""Which of the things that there are, modulo their number."""
REASONS = st.sampled_from(["", "enough", "wrong\u2029one"])
HOWS = ["returned", "raised", "stopped", "stopped by worker", "handed back"]
HOW = st.sampled_from(HOWS)
PICKS = st.lists(st.tuples(PICK, HOW), min_size=1, max_size=3)


ACTIONS: dict[str, Callable[[Any, int], None]] = {
    "claim": lambda machine, pick: machine.claim(pick % SLOTS, 2, second=False, begins=pick % 3),
    "begin": lambda machine, pick: machine.begins([pick, pick + 1]),
    "end": lambda machine, pick: machine.attempts_end([(pick, HOWS[pick % len(HOWS)])]),
    "fail": lambda machine, pick: machine.attempts_end([(pick, "raised")]),
    "hand back": lambda machine, pick: machine.attempts_end([(pick, "handed back")]),
    "lease": lambda machine, pick: machine.lease_runs_out(pick),
    "cancel": lambda machine, pick: machine.cancel(pick, "please", running=True),
    "retry": lambda machine, pick: machine.retry(pick, "failed"),
    "housekeeping": lambda machine, pick: machine.housekeeping("promote"),
    "enqueue": lambda machine, pick: machine.enqueue(1 + pick % 3, 0, None, pick % 2, 1),
}
ACTION = st.tuples(st.sampled_from(sorted(ACTIONS)), PICK)


@dataclasses.dataclass(slots=True)
class Slot:
    """A worker process: its row, and the attempts that run in it."""

    row: int
    claims: Claims
    running: list[RunningJob] = dataclasses.field(default_factory=list)


class JobsMachine(RuleBasedStateMachine):
    """Steps of workers, users and accidents, each compared with the model at once."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[str, ModelJob] = {}
        self.leases: dict[int, ModelLease] = {}
        self.slots: list[Slot] = []
        self.seconds = 0.0
        self.fences: Counter[str] = Counter()
        self.reported: dict[str, float | None] = {}
        self.others = Others()

    @initialize(actions=st.lists(ACTION, min_size=30, max_size=50))
    def begin(self, actions: list[tuple[str, int]]) -> None:
        with connection.cursor() as cursor:
            for statement in EMPTY[connection.vendor]:
                cursor.execute(statement)
        self.slots = [self.started(f"w{n}") for n in range(SLOTS)]
        self.enqueue(max_attempts=2, backoff=0, delay=None, priority=0, count=3)
        self.claim(0, limit=2, second=True, begins=1)
        self.much_happens(actions)

    def teardown(self) -> None:
        if self.slots:
            try:
                self.others.end_all(self)
                self.everything_ends()
                self.the_log_tells_each_story_once()
            finally:
                self.others.close()

    # Enqueue

    @rule(
        max_attempts=st.integers(1, 3),
        backoff=st.sampled_from([0, 5_000]),
        delay=st.sampled_from([None, None, None, 3_000, -3_000]),
        priority=st.sampled_from([0, 0, -1, 1]),
        count=st.integers(1, 3),
    )
    def enqueue(
        self, max_attempts: int, backoff: int, delay: int | None, priority: int, count: int
    ) -> None:
        run_after = delay and timezone.now() + dt.timedelta(seconds=delay)
        task = jobtasks.add.using(
            max_attempts=max_attempts,
            backoff=backoff,
            priority=priority,
            run_after=run_after or None,
        )
        state = "scheduled" if delay is not None and delay > 0 else "ready"
        for _ in range(count):
            result: Any = task.enqueue(1, 2)
            assert result.state == state
            self.jobs[result.id] = ModelJob(
                id=result.id, max_attempts=max_attempts, backoff=backoff, state=state
            )
        with transaction.atomic():
            task.enqueue(1, 2)
            transaction.set_rollback(True)

    # Workers

    def started(self, name: str) -> Slot:
        row = Worker.objects.register(
            name=name, host="here", pid=1, queues=["default"], concurrency=9, lease=LEASE
        )
        self.leases[row.pk] = ModelLease(left=LEASE)
        return Slot(row.pk, Claims(USING, clock=lambda: self.seconds))

    @precondition(lambda self: any(job.claimable for job in self.jobs.values()))
    @rule(
        number=SLOT,
        limit=st.integers(1, 4),
        second=st.booleans(),
        begins=st.sampled_from([0, 2, 4]),
    )
    def claim(self, number: int, limit: int, second: bool, begins: int) -> None:
        """After a second the best jobs come first, whatever was claimed before."""
        self.seconds += 2 * second
        slot = self.slots[number]
        order = Job.objects.order_by("-priority", "run_after", "pk").values_list("pk", flat=True)
        free = [
            id for id in map(str, order) if self.jobs[id].claimable and id not in self.others.locked
        ]
        wanted = free[:limit] if self.leases[slot.row].held else []
        claimed = slot.claims.take("default", worker_id=slot.row, worker_name="w", limit=limit)
        ids = [str(job.id) for job in claimed]
        if second:
            assert ids == wanted
        else:  # behind its floor a worker may miss what comes first
            assert len(ids) == len(wanted) and set(ids) <= set(free)
        for job in claimed:
            model = self.jobs[str(job.id)]
            model.claim(slot.row)
            assert (job.attempt, job.fence) == (model.attempt + 1, model.fence)
            assert len(job.errors) == model.errors
            self.reported[model.id] = None
        jobs = [RunningJob(job) for job in claimed]
        slot.running += jobs
        self.handlers_begin(jobs[:begins])

    @precondition(lambda self: any(slot.running for slot in self.slots))
    @rule(picks=st.lists(PICK, min_size=1, max_size=3))
    def begins(self, picks: list[int]) -> None:
        """Jobs that wait in their workers begin, or are counted again: the answer was lost."""
        running = [job for slot in self.slots for job in slot.running]
        if running:
            picked = {id(job): job for job in (running[pick % len(running)] for pick in picks)}
            self.handlers_begin(list(picked.values()))

    def handlers_begin(self, jobs: list[RunningJob]) -> None:
        expected = []
        for job in jobs:
            model = self.jobs[str(job.claimed.id)]
            ours = (model.state, model.fence) == ("running", job.claimed.fence)
            if ours and model.id not in self.others.locked:
                expected.append(job)
                if not model.begun:
                    model.begin()
        assert (begin(USING, jobs) if jobs else []) == expected
        for job in expected:
            assert job.begun and job.claimed.attempt == self.jobs[str(job.claimed.id)].attempt

    @rule(number=SLOT)
    def heartbeat(self, number: int) -> None:
        """A worker that finds its lease lost takes a new one; its handlers run on."""
        slot = self.slots[number]
        renewed = Worker.objects.heartbeat(slot.row, LEASE)
        assert renewed == self.leases[slot.row].renew(LEASE)
        if not renewed:
            fresh = self.started("again")
            slot.row = fresh.row

    @precondition(lambda self: any(slot.running for slot in self.slots))
    @rule(picks=PICKS)
    def attempts_end(self, picks: list[tuple[int, str]]) -> None:
        """Several attempts end, of any worker and maybe twice, written in one batch."""
        running = [(slot, job) for slot in self.slots for job in slot.running]
        if not running:
            return
        self.written([(*running[pick % len(running)], how) for pick, how in picks])

    @rule(actions=st.lists(ACTION, min_size=6, max_size=12))
    def much_happens(self, actions: list[tuple[str, int]]) -> None:
        """What is most of a worker's day, in one step: more of it in the same time."""
        for name, pick in actions:
            ACTIONS[name](self, pick)

    def written(self, batch: list[tuple[Slot, RunningJob, str]]) -> None:
        # A handler that didn't begin can't return.
        batch = [(slot, job, how if job.begun else "handed back") for slot, job, how in batch]
        outcomes = [_outcome(job, how) for _, job, how in batch]
        settlement = settle(USING, outcomes)
        first: dict[str, tuple[RunningJob, str]] = {}
        for _, job, how in batch:  # of a job's last claim
            other = first.get(str(job.claimed.id))
            if other is None or job.claimed.fence > other[0].claimed.fence:
                first[str(job.claimed.id)] = (job, how)
        later, lost = set(), set()
        for id, (job, how) in first.items():
            model = self.jobs[id]
            if model.state != "running" or model.fence != job.claimed.fence:
                lost.add(id)
            elif id in self.others.locked:
                later.add(id)
            else:
                END[how](model)
        assert {str(o.id) for o in settlement.later} == later
        assert {str(o.id) for o in settlement.lost} == lost
        for slot, job, _ in batch:
            mine = first[str(job.claimed.id)][0]
            if job is mine and str(job.claimed.id) not in later and job in slot.running:
                slot.running.remove(job)

    @precondition(lambda self: any(slot.running for slot in self.slots))
    @rule(pick=PICK, fraction=st.sampled_from([0.25, 0.75]))
    def progress(self, pick: int, fraction: float) -> None:
        running = [job for slot in self.slots for job in slot.running]
        job = running[pick % len(running)].claimed
        write_progress(USING, [(job.id, job.fence, fraction, "")])
        model = self.jobs[str(job.id)]
        if (model.state, model.fence) == ("running", job.fence) and (
            model.id not in self.others.locked
        ):
            self.reported[model.id] = fraction

    @rule(number=SLOT, how=st.sampled_from(["shut down", "shut down", "cut short", "crash"]))
    def worker_ends(self, number: int, how: str) -> None:
        """It hands back what runs; or can't write that; or vanishes. Another one comes."""
        slot = self.slots[number]
        if how == "shut down":
            self.written([(slot, job, "handed back") for job in slot.running])
        if how != "crash":
            Worker.objects.stop(slot.row)
            lease = self.leases[slot.row]
            lease.stopped = lease.stopped or not lease.lost
        self.slots[number] = self.started("next")

    @precondition(lambda self: any(slot.running for slot in self.slots))
    @rule(pick=PICK)
    def lease_runs_out(self, pick: int) -> None:
        """A worker is silent for too long, and its handlers run on."""
        busy = [number for number, slot in enumerate(self.slots) if slot.running] or [0]
        number = busy[pick % len(busy)]
        row = self.slots[number].row
        Worker.objects.filter(pk=row).update(expires_at=timezone.now() - dt.timedelta(seconds=1))
        self.leases[row].left = -1
        self.rescue()
        if pick % 3:  # else it claims under the lost lease, and gets nothing
            self.heartbeat(number)

    @rule(pick=PICK)
    def somebody_deletes_the_row_of_a_worker_that_ended(self, pick: int) -> None:
        ended = [row for row, lease in self.leases.items() if not lease.held]
        if ended:
            Worker.objects.filter(pk=ended[pick % len(ended)]).delete()

    # Everybody's work

    @rule(names=st.sampled_from(["rescue promote sweep", "rescue", "promote", "sweep"]))
    def housekeeping(self, names: str) -> None:
        for name in names.split():
            getattr(self, name)()

    def rescue(self) -> None:
        for lease in self.leases.values():
            if lease.held and lease.left < 0:
                lease.lost = True
        expected = 0
        for model in self.jobs.values():
            if model.state == "running" and model.id not in self.others.locked:
                assert model.holder is not None
                if not self.leases[model.holder].held:
                    model.abandoned()
                    expected += 1
        assert rescue(USING) == expected

    def promote(self) -> None:
        due = dict(Job.objects.due(timezone.now()).values_list("pk", "state"))
        promote(USING, ["default"])
        for id in map(str, due):
            if id not in self.others.locked:
                self.jobs[id].state = "ready"

    def sweep(self) -> None:
        sweep(USING)
        for model in self.jobs.values():
            if model.waiting and model.request is not None and model.id not in self.others.locked:
                model.swept()
            elif model.final:
                model.request = None

    @rule(seconds=STEPS)
    def time_passes(self, seconds: float) -> None:
        self.seconds += seconds
        by = dt.timedelta(seconds=seconds)
        Worker.objects.update(expires_at=F("expires_at") - by)
        Job.objects.exclude(pk__in=self.others.locked).update(run_after=F("run_after") - by)
        for lease in self.leases.values():
            lease.left -= seconds

    # Users

    @rule(pick=PICK, reason=REASONS, running=st.booleans())
    def cancel(self, pick: int, reason: str, running: bool) -> None:
        model = self.one_of(self.jobs, pick, "running" if running else "")
        if model.id == self.others.asking:
            return  # it would wait for the transaction that asks already
        held = model.id in self.others.locked
        assert control.cancel(model.id, reason) == model.cancel(reason, held=held)

    @rule(pick=PICK, state=st.sampled_from(["cancelled", "failed", ""]))
    def retry(self, pick: int, state: str) -> None:
        model = self.one_of(self.jobs, pick, state)
        if model.id not in self.others.locked:
            assert control.retry(model.id) == model.retry()

    # Other sessions (PostgreSQL)

    @precondition(lambda self: on_postgres() and self.jobs and not self.others.holding)
    @rule(pick=PICK)
    def somebody_holds_a_job(self, pick: int) -> None:
        id = self.one_of(self.jobs, pick).id
        if id not in self.others.locked:
            self.others.hold(id)

    @precondition(lambda self: self.others.holding)
    @rule()
    def somebody_lets_go(self) -> None:
        self.others.release()

    @precondition(lambda self: on_postgres() and self.jobs and not self.others.cancelling)
    @rule(pick=PICK, reason=REASONS)
    def cancel_in_a_transaction_that_stays_open(self, pick: int, reason: str) -> None:
        model = self.one_of(self.jobs, pick)
        answer = self.others.begin_cancel(model.id, reason, anew=model.request is None)
        would = dataclasses.replace(model)
        assert answer == would.cancel(reason, held=model.id in self.others.locked_by_holder)

    @precondition(lambda self: self.others.cancelling)
    @rule(commit=st.booleans())
    def that_transaction_ends(self, commit: bool) -> None:
        self.others.end_cancel(self, commit=commit)

    # What always holds

    @invariant()
    def the_database_is_the_model(self) -> None:
        rows = {str(row.pk): row for row in Job.objects.all()}
        assert rows.keys() == self.jobs.keys()
        for id, model in self.jobs.items():
            row = rows[id]
            assert (row.state, row.attempt, row.fence) == (
                model.state,
                model.attempt,
                model.fence,
            ), id
            assert row.max_attempts == model.max_attempts
            assert row.cancel_reason == model.reason
            assert len(row.errors) == model.errors
            assert (row.finished_at is not None) == model.final
            assert row.worker_id == model.holder
            assert row.fence >= self.fences[id]
            if model.state == "running":
                assert row.progress == self.reported.get(id)
            self.fences[id] = row.fence
        requests = {str(request.job_id): request.reason for request in CancelRequest.objects.all()}
        wanted = {id: job.request for id, job in self.jobs.items() if job.request is not None}
        assert requests == wanted

    # The end

    def everything_ends(self) -> None:
        """The workers are gone; one that comes now finishes every job."""
        self.time_passes(50_000)
        self.slots = [self.started("last")]
        self.rescue()
        self.sweep()
        for _ in range(100):
            self.promote()
            self.claim(0, 4, second=True, begins=4)
            slot = self.slots[0]
            if not slot.running:
                break
            self.written([(slot, job, "returned") for job in slot.running])
            self.time_passes(100_000)
            self.heartbeat(0)
        self.sweep()
        self.the_database_is_the_model()
        assert all(job.final for job in self.jobs.values())

    def the_log_tells_each_story_once(self) -> None:
        if not self.jobs:
            return
        stream = Stream("emq.default")
        while stream.relay():
            pass
        told: dict[str, str] = dict.fromkeys(self.jobs, "")
        for record in stream.replay():
            told[record.key] += LETTERS[record.type]
            assert record.data["id"] == record.key
        assert told.keys() == self.jobs.keys()
        for id, model in self.jobs.items():
            # When a request is told depends on when its transaction ended.
            assert told[id].replace("Q", "") == model.story, id
            assert told[id].count("Q") == model.requests
            assert sum(told[id].count(letter) for letter in TERMINAL_RECORDS) == model.lives

    @staticmethod
    def one_of(jobs: dict[str, ModelJob], pick: int, state: str = "") -> ModelJob:
        """Pick a job, of a state if there is one."""
        some = [job for job in jobs.values() if job.state == state] or list(jobs.values())
        return some[pick % len(some)]


class Others:
    """Two more sessions: one holds a job's row, one cancels and doesn't commit."""

    def __init__(self) -> None:
        self.locked_by_holder: set[str] = set()
        self.cancelling: tuple[str, str, str] | None = None
        """(id, reason, answer)"""
        self._anew = False
        """Whether it is the first to ask for that job: else it has written nothing."""
        self._holder: Any = None
        self._canceller: Any = None
        self._atomic: Any = None

    @property
    def holding(self) -> bool:
        return bool(self.locked_by_holder)

    @property
    def locked(self) -> set[str]:
        """Jobs whose rows somebody else holds."""
        if self.cancelling and self.cancelling[2] == "cancelled":
            return {*self.locked_by_holder, self.cancelling[0]}
        return self.locked_by_holder

    @property
    def asking(self) -> str | None:
        """The job that the open transaction cancels."""
        return self.cancelling[0] if self.cancelling else None

    def hold(self, id: str) -> None:
        if self._holder is None:
            self._holder = session()
        self._holder.execute("BEGIN")
        self._holder.execute(
            "SELECT 1 FROM echomq_job WHERE id = %s FOR UPDATE", [JobId.parse(id).hex]
        )
        self.locked_by_holder = {id}

    def release(self) -> None:
        self._holder.execute("ROLLBACK")
        self.locked_by_holder = set()

    def begin_cancel(self, id: str, reason: str, *, anew: bool) -> str:
        with self._as_canceller():
            self._atomic = transaction.atomic()
            self._atomic.__enter__()
            answer = control.cancel(id, reason)
        self.cancelling, self._anew = (id, reason, answer), anew
        return answer

    def end_cancel(self, machine: JobsMachine, *, commit: bool) -> None:
        assert self.cancelling
        id, reason, answer = self.cancelling
        self.cancelling = None
        with self._as_canceller():
            transaction.set_rollback(not commit)
            self._atomic.__exit__(None, None, None)
        model = machine.jobs[id]
        if not commit or answer == "finished":
            return
        if answer == "cancelled":
            model.swept(reason)
        elif self._anew:
            model.request = reason
            model.requests += 1

    def end_all(self, machine: JobsMachine) -> None:
        if self.holding:
            self.release()
        if self.cancelling:
            self.end_cancel(machine, commit=True)

    def close(self) -> None:
        for other in (self._holder, self._canceller):
            if other is not None:
                other.close()

    @contextlib.contextmanager
    def _as_canceller(self) -> Iterator[None]:
        """Let Django's connection be the second one, in this thread."""
        first = connections[USING]
        if self._canceller is None:
            self._canceller = first.copy()
        connections[USING] = self._canceller
        try:
            yield
        finally:
            connections[USING] = first


END = {
    "returned": ModelJob.returned,
    "raised": ModelJob.raised,
    "stopped": lambda job: job.stopped("by itself", by_worker=False),
    "stopped by worker": lambda job: job.stopped("shutdown", by_worker=True),
    "handed back": ModelJob.handed_back,
}
TABLES = [
    f"echomq_{name}" for name in ("cancelrequest", "job", "worker", "record", "outbox", "stream")
]
EMPTY = {
    "sqlite": [f"DELETE FROM {table}" for table in TABLES],
    "postgresql": [f"TRUNCATE {', '.join(TABLES)} RESTART IDENTITY"],
}


def on_postgres() -> bool:
    return connection.vendor == "postgresql"


def _outcome(running: RunningJob, how: str) -> Outcome:
    job = running.claimed
    error = {"class": "ValueError", "message": "no", "traceback": "", "attempt": job.attempt}
    return {
        "returned": lambda: outcome(job, Ending.RETURNED),
        "raised": lambda: outcome(job, Ending.RAISED, error=error),
        "stopped": lambda: outcome(job, Ending.STOPPED, reason="by itself"),
        "stopped by worker": lambda: outcome(
            job, Ending.STOPPED, reason="shutdown", by_worker=True
        ),
        "handed back": lambda: outcome(
            job, Ending.HANDED_BACK, reason="shutdown", begun=running.begun
        ),
    }[how]()


@pytest.mark.timeout(900 if settings().max_examples < 1000 else 3600)  # or in make chaos
def test_any_sequence_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "echomq.jobs")
    run_state_machine_as_test(
        JobsMachine,
        settings=settings(
            max_examples=settings().max_examples // (3 if on_postgres() else 2),
            stateful_step_count=10,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
