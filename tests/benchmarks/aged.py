"""Jobs in a table that has aged: under a snapshot held open, and among a million finished ones.

    python -m tests.benchmarks aged --json
    python -m tests.benchmarks aged --json --finished 1000000 --seconds 60

`held snapshot`: jobs per second of one worker in the last sixth of the time for which another
connection holds a snapshot, as pg_dump does; beside the same part of a run without. Records
count too: what waits in the outbox at the end is reported.

`finished jobs`: milliseconds per claim, beside the same claims while old jobs are pruned, and
seconds from the start of a worker's process to the start of a job that waited for it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from statistics import median, quantiles
from typing import Any

import psycopg

from project.children import Child
from tests.layers import ROOT

from .databases import django_on
from .figures import alternate, compare

QUEUE = "bench"
HELD, FREE = "snapshot held", "free"
JOBS_PER_SECOND = 5_000
CLAIMS = 200

Connection = psycopg.Connection[Any]


def run(
    *, rounds: int, quick: bool, finished: int = 1_000_000, seconds: float = 60.0
) -> dict[str, Any]:
    """Measure on PostgreSQL. `seconds`: how long the snapshot is held."""
    if quick:
        finished, seconds = 2_000, 1.2
    with contextlib.ExitStack() as stack:
        dsn = stack.enter_context(django_on("postgres", durable=not quick))
        connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        aged = _among_finished(connection, finished)
        left: dict[str, int] = {}
        contenders = {
            name: partial(_last_rate, dsn, connection, name, seconds, left) for name in (HELD, FREE)
        }
        compared = compare(alternate(contenders, rounds), unit="jobs/s", ours=HELD)
    return {
        "name": "aged",
        **compared,
        "rounds": rounds,
        "seconds": seconds,
        "records_in_the_outbox_at_the_end": left,
        "finished_jobs": finished,
        **aged,
    }


# Under a snapshot


def _last_rate(
    dsn: str, connection: Connection, name: str, seconds: float, left: dict[str, int]
) -> float:
    """Return the jobs per second of the last sixth."""
    from .jobs import _fill_ours

    connection.execute("TRUNCATE echomq_job, echomq_outbox, echomq_record CASCADE")
    _fill_ours(int(JOBS_PER_SECOND * seconds))
    connection.execute("VACUUM ANALYZE echomq_job")
    holder = _snapshot(dsn) if name == HELD else contextlib.nullcontext()
    with holder, _worker() as child:
        whole = _ready(connection)
        while (begun := _ready(connection)) == whole:
            child.check()
            time.sleep(0.02)
        until = time.monotonic() + seconds * 5 / 6
        while time.monotonic() < until:
            child.check()
            time.sleep(0.1)
        first, at = _ready(connection), time.monotonic()
        time.sleep(seconds / 6)
        last, end = _ready(connection), time.monotonic()
        if not 0 < last <= first < begun:
            raise RuntimeError(f"Jobs that were ready: {begun}, {first}, {last}.")
        (left[name],) = connection.execute("SELECT count(*) FROM echomq_outbox").fetchone() or (0,)
    return (first - last) / (end - at)


@contextlib.contextmanager
def _snapshot(dsn: str) -> Iterator[None]:
    with psycopg.connect(dsn) as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT count(*) FROM echomq_stream")
        yield


@contextlib.contextmanager
def _worker() -> Iterator[Child]:
    command = [sys.executable, "manage.py", "echomq_worker", "--queue", QUEUE]
    with Child(command, env=dict(os.environ), cwd=ROOT, name="worker") as child:
        yield child


def _ready(connection: Connection) -> int:
    # As the index has it: a scan of a million rows would take the worker's CPU.
    where = "state = 'ready' AND NOT parked AND queue = %s"
    statement = f"SELECT count(*) FROM echomq_job WHERE {where}"
    (number,) = connection.execute(statement, (QUEUE,)).fetchone() or (0,)
    return int(number)


# Among finished jobs


def _among_finished(connection: Connection, number: int) -> dict[str, Any]:
    """Time claims and the start of a worker."""
    from echomq_app.jobs.claims import Claims
    from echomq_app.jobs.retention import prune_finished
    from echomq_app.models.times import now
    from tests.integration.jobs import register

    empty = median(_start(connection) for _ in range(3))
    _copies(connection, number)
    me = register("bench", lease=3_600)
    claims = Claims("default")

    def claim() -> float:
        from .jobs import _fill_ours

        _fill_ours(1)
        begun = time.perf_counter()
        claimed = claims.take(QUEUE, worker_id=me.pk, worker_name=me.name, limit=1)
        elapsed = time.perf_counter() - begun
        if len(claimed) != 1:
            raise RuntimeError("There was no job to claim.")
        return elapsed * 1_000

    alone = [claim() for _ in range(CLAIMS)]
    start = median(_start(connection) for _ in range(3))
    pruned: list[int] = []
    thread = threading.Thread(target=lambda: pruned.append(prune_finished("default", now())[0]))
    begun = time.monotonic()
    thread.start()
    beside = [claim()]
    while thread.is_alive():
        beside.append(claim())
    return {
        "claim_ms": _figures(alone),
        "claim_while_pruning_ms": _figures(beside),
        "worker_start_s": round(start, 2),
        "worker_start_in_an_empty_table_s": round(empty, 2),
        "of_which_django_s": round(median(_set_up() for _ in range(3)), 2),
        "pruned": pruned[0],
        "prune_s": round(time.monotonic() - begun, 1),
    }


def _copies(connection: Connection, number: int) -> None:
    """Have that many finished jobs, of yesterday, each with an id of its own."""
    from .jobs import _fill_ours

    connection.execute("TRUNCATE echomq_job, echomq_outbox CASCADE")
    _fill_ours(1)
    columns = [
        name
        for (name,) in connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = 'echomq_job'::regclass"
            " AND attnum > 0 AND NOT attisdropped"
        )
    ]
    given = {
        "id": "(lpad(to_hex((extract(epoch FROM now() - interval '1 day') * 1000)::bigint + n),"
        " 12, '0') || substr(md5(n::text), 13))::uuid",
        "state": "'completed'",
        "finished_at": "now() - interval '1 day' + n * interval '1 ms'",
    }
    values = ", ".join(given.get(name, name) for name in columns)
    connection.execute(
        f"INSERT INTO echomq_job ({', '.join(columns)}) SELECT {values}"
        " FROM echomq_job, generate_series(1, %s) AS n",
        (number,),
    )
    connection.execute("DELETE FROM echomq_job WHERE state = 'ready'")
    connection.execute("VACUUM ANALYZE echomq_job")


def _set_up() -> float:
    """Return the seconds that a process needs which only sets up Django."""
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", "import django; django.setup()"], cwd=ROOT, check=True)
    return time.monotonic() - begun


def _start(connection: Connection) -> float:
    """Return the seconds from a worker's start, as a process, to the end of a job."""
    from .jobs import _fill_ours

    _fill_ours(1)
    begun = time.monotonic()
    with _worker() as child:
        while _ready(connection):
            child.check()
            time.sleep(0.005)
        return time.monotonic() - begun


def _figures(milliseconds: list[float]) -> dict[str, float]:
    return {
        "p50": round(median(milliseconds), 2),
        "p95": round(quantiles(milliseconds, n=20)[-1], 2) if len(milliseconds) > 1 else 0.0,
        "max": round(max(milliseconds), 2),
        "claims": len(milliseconds),
    }
