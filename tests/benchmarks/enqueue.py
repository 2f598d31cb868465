"""Jobs enqueued per second by 24 clients at once, while a worker runs.

    python -m tests.benchmarks enqueue --json

Beside the same call whose statement inserts the job's row alone: the ratio is what the
`enqueued` record costs, for clients and database together. And beside statements sent with
psycopg, which show what Django costs the client: `its statement` is what `enqueue` sends,
`insert job` the bare row; `statement_to_insert` is the record's price in the database.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from project.children import Child

from .crew import Crew, Load
from .databases import django_on
from .enqueuers import QUEUE, THREADS
from .figures import alternate, compare

OURS, ROW_ALONE = "enqueue", "enqueue without the record"
STATEMENT, BARE = "its statement", "insert job"
PROCESSES = 4
SLICES, SLICE_SECONDS, QUICK_SECONDS = 4, 0.5, 0.2
ROOT = Path(__file__).resolve().parent.parent.parent


def run(*, rounds: int, quick: bool) -> dict[str, Any]:
    """Measure all in turn, against the same worker, which also runs what the peer inserts."""
    seconds = QUICK_SECONDS if quick else SLICE_SECONDS
    processes = 1 if quick else PROCESSES
    with (
        django_on("postgres", durable=not quick) as dsn,
        _worker(),
        Crew(processes, dsn) as crew,
    ):
        contenders = {
            name: partial(_measure, crew, Load(contender=name), seconds)
            for name in (OURS, ROW_ALONE, STATEMENT, BARE)
        }
        figures = alternate(contenders, rounds * (1 if quick else SLICES))
    result = compare(figures, unit="jobs/s", ours=OURS)
    statement = median(figures[STATEMENT]) / median(figures[BARE])
    return {
        "name": "enqueue",
        **result,
        "statement_to_insert": round(statement, 3),
        "rounds": rounds,
        "clients": processes * THREADS,
    }


def _measure(crew: Crew, load: Load, seconds: float) -> float:
    from echomq_app.models import Job

    rate = crew.rate(load, seconds)
    # Else the one that comes later would share the machine with a longer backlog.
    Job.objects.filter(state="ready").delete()
    return rate


@contextlib.contextmanager
def _worker() -> Iterator[Child]:
    command = [sys.executable, "manage.py", "echomq_worker", "--queue", QUEUE]
    with Child(command, env=dict(os.environ), cwd=ROOT, name="echomq_worker") as child:
        child.wait_for_output("is ready")
        yield child
