"""Four workers killed, frozen, stopped and cut off, while their servers restart under them.

In `make chaos` the processes of their handlers are killed, too.

Each job appends one record in a transaction of its own. At the end every job has ended
once, the log tells a story of each that can be true, no effect is missing, and what was
answered to whoever cancelled holds. The test's name has the seed of its choices;
`ECHOMQ_CHAOS_SEED` repeats them. `make chaos` is the whole of it: 5,000 jobs.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable

import hypothesis
import pytest
from django.db import connection, connections, transaction

from echomq_app.exceptions import UnknownStream
from echomq_app.jobs import control
from echomq_app.jobs.housekeeping import sweep
from echomq_app.models import CancelRequest, Job
from echomq_app.stream import Stream, StreamRecord
from project.children import Child
from tests.acceptance.workers import StartWorker, starting_workers
from tests.chaos.effects import append_an_effect
from tests.job_model import LETTERS, TERMINAL_RECORDS
from tests.servers import Postgres, Redis
from tests.wait import wait_until

# The processes of one run with pytest-xdist have to agree on it: it is part of the test's name.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(time.time_ns()))
SEED = int(os.environ.get("ECHOMQ_CHAOS_SEED", zlib.crc32(RUN.encode()) % 1_000_000))
LONG = hypothesis.settings().max_examples >= 1000  # the profile of `make chaos`
JOBS, FAULTS = (5_000, 120) if LONG else (320, 8)
WORKERS = 4
FINAL = ["completed", "failed", "cancelled"]

STORY = re.compile(r"E(?:SL?R)*(?:X|S(?:C|F|X|L[FX]))\Z")
"""What may be told about one job, in this order and no other; see LETTERS."""


class Crew:
    """Four workers, their servers, and what can happen to them."""

    def __init__(
        self, start: StartWorker, rng: random.Random, redis: Redis, postgres: Postgres | None
    ) -> None:
        self.start = start
        self.rng = rng
        self.redis = redis
        self.postgres = postgres
        self.workers = [self.new() for _ in range(WORKERS)]

    def new(self) -> Child:
        options = ("--queue", "default", "--grace", "0.5")
        sizes = ("--concurrency", "4", "--process-concurrency", "2")
        extra = {"ECHOMQ_REDIS_URL": self.redis.url}
        return self.start(*options, *sizes, ready=False, extra=extra)

    def plan(self) -> list[Callable[[], None]]:
        """Choose the faults: each kind equally often, in any order."""
        kinds = [self.kill, self.terminate, self.freeze, self.restart_redis]
        if LONG:
            kinds.append(self.kill_handlers)
        if self.postgres is not None:
            kinds += [self.drop_connections, self.crash_postgres]
        faults = [kinds[n % len(kinds)] for n in range(FAULTS)]
        self.rng.shuffle(faults)
        return faults

    def tend(self) -> bool:
        """Replace the workers that ended; True."""
        self.workers = [worker if worker.running else self.new() for worker in self.workers]
        return True

    def kill(self) -> None:
        self.rng.choice(self.workers).kill()

    def kill_handlers(self) -> None:
        """The processes in which handlers run, of one worker."""
        parent = str(self.rng.choice(self.workers).pid)
        shown = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", parent], capture_output=True, text=True, check=False
        )
        for pid in shown.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def terminate(self) -> None:
        self.rng.choice(self.workers).send_signal(signal.SIGTERM)

    def freeze(self) -> None:
        """For less than the lease, or for longer."""
        worker = self.rng.choice(self.workers)
        # It may hold the lock that this thread waits for: another one lets it go on.
        timer = threading.Timer(self.rng.choice([0.3, 3.0]), worker.send_signal, [signal.SIGCONT])
        timer.daemon = True
        worker.send_signal(signal.SIGSTOP)
        timer.start()

    def restart_redis(self) -> None:
        self.redis.kill()
        self.redis.restart_empty()

    def drop_connections(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )

    def crash_postgres(self) -> None:
        assert self.postgres is not None
        connections.close_all()
        self.postgres.crash()
        self.postgres.restart()


@pytest.mark.timeout(1800 if LONG else 300)
@pytest.mark.parametrize("seed", [SEED])
def test_every_job_ends_once_whatever_happens_to_workers_and_servers(
    subprocess_env: dict[str, str],
    make_redis: Callable[[], Redis],
    request: pytest.FixtureRequest,
    seed: int,
) -> None:
    rng = random.Random(seed)
    postgres = None
    if connection.vendor == "postgresql":
        postgres = request.getfixturevalue("postgres_server")
    ids: list[str] = []
    answers: dict[str, str] = {}
    with starting_workers(subprocess_env) as start:
        crew = Crew(start, rng, make_redis(), postgres)
        for number, fault in enumerate(crew.plan(), start=1):
            new = enqueue(rng, JOBS * number // FAULTS - len(ids))
            for id in rng.sample(new, len(new) // 20):
                answers[id] = control.cancel(id, "chaos")
            ids += new
            some_time_or_jobs_pass(crew, unfinished=len(new) // 2)
            fault()
            crew.tend()
        wait_until(lambda: crew.tend() and not unfinished(), 240, "all jobs end", poll=0.1)
    check(ids, answers)


def enqueue(rng: random.Random, count: int) -> list[str]:
    # In `make chaos` alone: a process takes a second to start.
    by_process = append_an_effect.using(process=True) if LONG else append_an_effect
    with transaction.atomic():
        return [
            (by_process if rng.random() < 0.2 else append_an_effect)
            .enqueue(rng.choice([0, 0.02, 0.2]), rng.random() < 0.1)
            .id
            for _ in range(count)
        ]


def unfinished() -> int:
    return Job.objects.exclude(state__in=FINAL).count()


def some_time_or_jobs_pass(crew: Crew, *, unfinished: int) -> None:
    """Faults come while there is something to do, and so do jobs while there are faults."""
    end = time.monotonic() + crew.rng.uniform(0.2, 2.0)
    while time.monotonic() < end and Job.objects.exclude(state__in=FINAL).count() > unfinished:
        crew.tend()
        time.sleep(0.05)


def check(ids: list[str], answers: dict[str, str]) -> None:
    stream = Stream("emq.default")
    sweep("default")  # what a worker would do next: forget requests that came too late
    wait_until(lambda: stream.relay() == 0)
    told: dict[str, str] = dict.fromkeys(ids, "")
    for position, record in enumerate(stream.replay()):
        assert record.position == position
        told[record.key] += LETTERS[record.type]
    assert told.keys() == set(ids) and len(ids) == JOBS
    effects = Counter(record.key for record in replayed("effects"))
    jobs = {str(job.pk): job for job in Job.objects.all()}
    assert jobs.keys() == told.keys() and not CancelRequest.objects.exists()
    for id, letters in told.items():
        job = jobs[id]
        # A request may be told at any moment after the first start.
        story = letters.replace("Q", "")
        assert STORY.match(story), (id, letters)
        assert sum(map(story.count, TERMINAL_RECORDS)) == 1
        assert LETTERS[job.state] == story[-1], (id, letters)
        # A claim whose handler never began has no record.
        assert 0 <= job.attempt <= job.max_attempts and job.fence >= story.count("S")
        if answers.get(id) == "cancelled":
            assert job.state == "cancelled", (id, letters)
        if job.state == "completed":
            assert effects[id] >= 1, (id, letters)
        if job.state == "failed":  # as an error after a request to cancel is, and no other
            assert answers.get(id) == "requested", (id, letters, job.errors)
        assert effects[id] <= story.count("S")
    assert effects.keys() <= told.keys()


def replayed(name: str) -> list[StreamRecord]:
    try:
        return list(Stream(name).replay())
    except UnknownStream:
        return []
