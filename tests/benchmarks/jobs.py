"""Jobs per second by one worker process, beside procrastinate, django-tasks-db and Dramatiq.

    python -m tests.benchmarks jobs --json

No-op sync tasks, results kept. Each queue is filled, its worker started, and the rate taken
from the moment when the first jobs are done to the moment when all are: what starting a
worker takes isn't counted. Ours has told of each job three times in the log by then.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import psycopg

from project.children import Child
from tests.layers import ROOT
from tests.servers import private_redis

from .databases import django_on
from .figures import alternate, compare
from .job_peers import QUEUE, dramatiq_broker, procrastinate_app

OURS = "ours"
PEERS = f"{__package__}.job_peers"
DONE_FIRST = 0.02
"""The part of the jobs that is done before the clock starts."""
DEADLINE = 120.0


def run(*, rounds: int, quick: bool) -> dict[str, Any]:
    """Measure, on PostgreSQL; Dramatiq on Redis."""
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(private_redis())
        os.environ["ECHOMQ_BENCH_REDIS"] = redis.url
        stack.callback(os.environ.pop, "ECHOMQ_BENCH_REDIS")
        dsn = stack.enter_context(django_on("postgres", durable=not quick))
        connection = stack.enter_context(psycopg.connect(dsn, autocommit=True))
        contenders = dict(_contenders(stack, dsn, connection, quick))
        cases = [
            {"case": case, **compare(alternate(them, rounds), unit="jobs/s", ours=OURS)}
            for case, them in (("run", contenders), *_enqueuing(stack, dsn, connection, quick))
        ]
    top = {key: value for key, value in cases[0].items() if key != "case"}
    return {
        "name": "jobs",
        **top,
        "cases": cases,
        "rounds": rounds,
        "missing": sorted(set(ALL) - set(contenders)),
    }


ALL = (OURS, "procrastinate, 1", "procrastinate, 8", "django-tasks-db", "dramatiq, 8 threads")
_JOBS = dict(zip(ALL, (20_000, 1_000, 2_000, 500, 8_000), strict=True))


def _contenders(
    stack: contextlib.ExitStack, dsn: str, connection: psycopg.Connection[Any], quick: bool
) -> Iterator[tuple[str, Callable[[], float]]]:
    def measured(name: str, worker: Sequence[str], fill: Any, left: Any) -> Any:
        number = 50 if quick else _JOBS[name]
        return name, partial(_rate, number, worker, fill, left)

    manage, module = [sys.executable, "manage.py"], [sys.executable, "-m"]
    peers = [*module, PEERS]
    yield measured(
        OURS,
        [*manage, "echomq_worker", "--queue", QUEUE],
        _fill_ours,
        partial(_count, connection, OURS_LEFT),
    )
    if _there("procrastinate"):
        app, noop = procrastinate_app(dsn)
        stack.enter_context(app.open())
        app.schema_manager.apply_schema()
        for concurrency in ("1", "8"):
            yield measured(
                f"procrastinate, {concurrency}",
                [*peers, "procrastinate", dsn, concurrency],
                lambda number: noop.batch_defer(*({"number": n} for n in range(number))),
                partial(_count, connection, PROCRASTINATE_LEFT),
            )
    if _there("django_tasks_db"):
        yield measured(
            "django-tasks-db",
            [*manage, "db_worker", "--backend", "peer", "--queue-name", "*", "--interval", "0"],
            _fill_django_tasks_db,
            partial(_count, connection, DJANGO_TASKS_DB_LEFT),
        )
    if _there("dramatiq"):
        broker, actor = dramatiq_broker()
        yield measured(
            "dramatiq, 8 threads",
            [*module, "dramatiq", f"{PEERS}:broker", "--processes", "1", "--threads", "8"],
            lambda number: [actor.send(n) for n in range(number)],
            lambda: broker.client.hlen(f"dramatiq:{QUEUE}.msgs"),
        )


def _enqueuing(
    stack: contextlib.ExitStack, dsn: str, connection: psycopg.Connection[Any], quick: bool
) -> Iterator[tuple[str, dict[str, Callable[[], float]]]]:
    """Jobs enqueued per second: one by one, each its own transaction, and many at once."""
    single: dict[str, Callable[[int], object]] = {OURS: _enqueue_ours}
    many: dict[str, Callable[[int], object]] = {OURS: _fill_ours}
    if _there("procrastinate"):
        app, noop = procrastinate_app(dsn)
        stack.enter_context(app.open())
        single["procrastinate"] = lambda number: [noop.defer(number=n) for n in range(number)]
        many["procrastinate"] = lambda number: noop.batch_defer(
            *({"number": n} for n in range(number))
        )
    numbers = (20, 100) if quick else (500, 5_000)
    for case, contenders, number in zip(
        ("enqueue one by one", "enqueue many"), (single, many), numbers, strict=True
    ):
        yield (
            case,
            {
                name: partial(_timed, connection, enqueue, number)
                for name, enqueue in contenders.items()
            },
        )


def _timed(
    connection: psycopg.Connection[Any], enqueue: Callable[[int], object], number: int
) -> float:
    begun = time.perf_counter()
    enqueue(number)
    elapsed = time.perf_counter() - begun
    # Nobody runs these; the next round begins with as few.
    connection.execute("TRUNCATE echomq_job, echomq_outbox")
    connection.execute(
        "DO $$BEGIN IF to_regclass('procrastinate_jobs') IS NOT NULL"
        " THEN TRUNCATE procrastinate_jobs CASCADE; END IF; END$$"
    )
    return number / elapsed


def _there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _rate(
    number: int,
    worker: Sequence[str],
    fill: Callable[[int], object],
    left: Callable[[], int],
) -> float:
    """Fill the queue, start the worker, and return jobs per second."""
    fill(number)
    first = number - max(1, round(number * DONE_FIRST))
    began, at_first = 0.0, 0
    deadline = time.monotonic() + DEADLINE
    with Child(worker, env=dict(os.environ), cwd=ROOT, name=worker[2]) as child:
        while rest := left():
            at = time.monotonic()
            if not began and rest <= first:
                began, at_first = at, rest
            child.check()
            if at > deadline:
                raise RuntimeError(f"{rest} of {number} jobs are left.\n{child.output[-2000:]}")
            time.sleep(0.02)
        # Few jobs may all be done between two looks.
        return (at_first or number) / (time.monotonic() - (began or at))


# What is to be done or to be recorded. Looked up by index, not to disturb.
OURS_LEFT = f"""
    SELECT (SELECT count(*) FROM echomq_job WHERE queue = '{QUEUE}' AND state = 'ready')
         + (SELECT count(*) FROM echomq_job WHERE state = 'running')
         + (SELECT count(*) FROM (SELECT FROM echomq_outbox LIMIT 1) AS o)"""
PROCRASTINATE_LEFT = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
DJANGO_TASKS_DB_LEFT = (
    "SELECT count(*) FROM django_tasks_database_dbtaskresult WHERE status IN ('READY', 'RUNNING')"
)


def _count(connection: psycopg.Connection[Any], statement: str) -> int:
    (number,) = connection.execute(statement).fetchone() or (0,)
    return int(number)


def _fill_ours(number: int) -> None:
    from echomq_app.jobs.bulk import call, enqueue_many
    from tests.jobtasks import noop

    enqueue_many(noop.using(queue_name=QUEUE), [call(n) for n in range(number)])


def _enqueue_ours(number: int) -> None:
    from tests.jobtasks import noop

    task = noop.using(queue_name=QUEUE)
    for n in range(number):
        task.enqueue(n)


def _fill_django_tasks_db(number: int) -> None:
    from django.db import transaction

    from tests.jobtasks import noop

    task = noop.using(backend="peer")
    with transaction.atomic():
        for n in range(number):
            task.enqueue(n)
