"""Workers killed, stopped, frozen and cut off at random, under load and random cancels.

At the end every job has ended once, the log tells a story that can be true, and what was
answered to whoever cancelled holds. The test's name has the seed of its choices;
`ECHOMQ_CHAOS_SEED` repeats them. `make chaos` goes on for longer.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
import zlib
from pathlib import Path

import hypothesis
import pytest
from django.db import connection

from echomq_app.jobs import control
from echomq_app.models import CancelRequest, Job
from echomq_app.stream import Stream
from project.children import Child
from tests import jobtasks
from tests.acceptance.workers import StartWorker, starting_workers
from tests.jobtasks import marks
from tests.wait import wait_until

# The processes of one run with pytest-xdist have to agree on it: it is part of the test's name.
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(time.time_ns()))
SEED = int(os.environ.get("ECHOMQ_CHAOS_SEED", zlib.crc32(RUN.encode()) % 1_000_000))
SECONDS, LONG = 8, 120

# One letter per event: what may be told about one job, in this order and no other.
LETTERS = {
    "enqueued": "E",
    "started": "S",
    "retrying": "R",
    "stalled": "L",
    "cancel_requested": "Q",
    "completed": "C",
    "failed": "F",
    "cancelled": "X",
}
STORY = re.compile(r"E(?:SL?R)*(?:X|S(?:C|F|X|L[FX]))\Z")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [SEED])
def test_every_job_ends_once_whatever_happens_to_the_workers(
    subprocess_env: dict[str, str], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    long = hypothesis.settings().max_examples >= 1000  # the profile of `make chaos`
    trace = str(tmp_path / "trace")
    ids: list[str] = []
    answers: dict[str, str] = {}
    with starting_workers(subprocess_env) as start:
        workers = [start_one(start) for _ in range(3)]
        end = time.monotonic() + (LONG if long else SECONDS)
        while time.monotonic() < end:
            ids += [enqueue(rng, trace) for _ in range(rng.randrange(4))]
            if ids and rng.random() < 0.5:
                victim = rng.choice(ids[-10:])
                answers[victim] = answers.get(victim) or control.cancel(victim, "chaos")
            if rng.random() < 0.15:
                number = rng.randrange(len(workers))
                disturb(rng, workers[number])
                if not workers[number].running:
                    workers[number] = start_one(start)
            time.sleep(0.05)
        for worker in workers:
            worker.send_signal(signal.SIGCONT)
        Job.objects.filter(state="scheduled").update(run_after=Job.objects.first().enqueued_at)  # type: ignore[union-attr]
        wait_until(
            lambda: not Job.objects.exclude(state__in=["completed", "failed", "cancelled"]),
            120,
            "all jobs end",
        )
    check(ids, answers, trace)


def check(ids: list[str], answers: dict[str, str], trace: str) -> None:
    stream = Stream("emq.default")
    wait_until(lambda: stream.relay() == 0)
    records = list(stream.replay())
    assert [record.position for record in records] == list(range(len(records)))
    assert Job.objects.count() == len(ids) and not CancelRequest.objects.exists()
    started = set(marks(trace))
    for id in ids:
        told = [LETTERS[record.type] for record in records if record.key == id]
        # A request may be told at any moment after the first start.
        assert STORY.match("".join(told).replace("Q", "")), (id, told)
        job = Job.objects.get(pk=id)
        assert told[-1] == LETTERS[job.state] or told[-1] == "Q", (id, told)
        assert job.attempt <= job.max_attempts
        if answers.get(id) == "cancelled":
            assert job.state == "cancelled", (id, told)
        if job.state == "completed":
            assert id in started


def start_one(start: StartWorker) -> Child:
    return start("--queue", "default", "--concurrency", "3", "--grace", "0.5")


def enqueue(rng: random.Random, trace: str) -> str:
    return jobtasks.chaotic.enqueue(trace, rng.choice(["", "", "", "raise", "slow"])).id


def disturb(rng: random.Random, worker: Child) -> None:
    """Do something to a worker that it has to survive, or others have to make up for."""
    what = rng.choice(["kill", "stop", "freeze", "terminate connections"])
    if what == "kill":
        worker.kill()
    elif what == "stop":
        worker.send_signal(signal.SIGTERM)
        worker.wait()
    elif what == "freeze":
        worker.send_signal(signal.SIGSTOP)
        time.sleep(rng.choice([0.1, 3.0]))  # longer than the lease, or not
        worker.send_signal(signal.SIGCONT)
    elif connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE 'echomq %%'"
            )
