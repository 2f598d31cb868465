"""Clients that enqueue, for `enqueue.py`: ours, and statements that do less.

Each process is several clients, threads with a connection each: what is measured is the
database with many clients, not how many interpreters fit into a small machine.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import psycopg
from django.db import connections

from echomq_app.core.ids import new_job_id

THREADS = 6
CALLS = 5
"""How many each client does between two looks at the clock."""
QUEUE = "bench"
PATH = "tests.jobtasks.add"

_INSERT = (
    "INSERT INTO echomq_job (id, queue, task_path, arguments, priority, run_after, state,"
    " attempt, max_attempts, options, fence, worker_name, enqueued_at, progress_note, errors,"
    " cancel_reason) VALUES (%s, %s, %s, %s, 0, %s, 'ready', 0, 3, '{}', 0, '', %s, '', '[]', '')"
)
_WITH_RECORD = (
    f"WITH job AS ({_INSERT})"
    " INSERT INTO echomq_outbox (stream, record, xact) VALUES (%s, %s, NULL)"
)

One = Callable[[int], object]
Clients = contextlib.AbstractContextManager[Callable[[], int]]


def task_enqueue(load: Any, seat: Any) -> Clients:
    """Enqueue a task as a project does."""
    from tests.jobtasks import add

    task = add.using(queue_name=QUEUE)

    @contextlib.contextmanager
    def client() -> Iterator[One]:
        yield lambda number: task.enqueue(number, seat.number)

    return _clients(client)


def statement(load: Any, seat: Any) -> Clients:
    """Run the statement of `enqueue` with psycopg: the job and its record."""

    @contextlib.contextmanager
    def client() -> Iterator[One]:
        with psycopg.connect(seat.dsn, autocommit=True) as connection:
            yield lambda number: connection.execute(
                _WITH_RECORD, (*(row := _row(number)), f"emq.{QUEUE}", _record(row))
            )

    return _clients(client)


def insert_job(load: Any, seat: Any) -> Clients:
    """Insert the same row with psycopg, and no record of it: the least a queue can do."""

    @contextlib.contextmanager
    def client() -> Iterator[One]:
        with psycopg.connect(seat.dsn, autocommit=True) as connection:
            yield lambda number: connection.execute(_INSERT, _row(number))

    return _clients(client)


@contextlib.contextmanager
def without_record(load: Any, seat: Any) -> Iterator[Callable[[], int]]:
    """Enqueue in the same way, but the statement inserts the job's row alone."""
    from echomq_app.jobs import enqueueing

    ours = enqueueing._POSTGRES
    bare = ours[ours.index("INSERT") : ours.index(" RETURNING id) INSERT INTO echomq_outbox")]
    # Two parameters are left over: cut off here, formatted away there.
    bare += " RETURNING (%s::text IS NULL OR %s::text IS NULL)"
    with task_enqueue(load, seat) as enqueue:

        def write() -> int:
            enqueueing._POSTGRES = bare
            try:
                return enqueue()
            finally:
                enqueueing._POSTGRES = ours

        yield write


def _row(number: int) -> tuple[Any, ...]:
    at = dt.datetime.now(dt.UTC)
    arguments = f'{{"args": [{number}, 1], "kwargs": {{}}}}'
    return (new_job_id().hex, QUEUE, PATH, arguments, at, at)


def _record(row: tuple[Any, ...]) -> str:
    data = {"id": row[0], "task": PATH, "state": "ready", "attempt": 0, "at": row[4]}
    return msgspec.json.encode({"type": "enqueued", "key": row[0], "data": data}).decode()


@contextlib.contextmanager
def _clients(
    client: Callable[[], contextlib.AbstractContextManager[One]],
) -> Iterator[Callable[[], int]]:
    """Give a function with which all clients of this process do their calls."""
    numbers = itertools.count()
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(THREADS) as pool:
        ones = [stack.enter_context(client()) for _ in range(THREADS)]

        def calls(one: One) -> None:
            for _ in range(CALLS):
                one(next(numbers))

        def write() -> int:
            list(pool.map(calls, ones))
            return THREADS * CALLS

        yield write
        list(pool.map(lambda _: connections.close_all(), ones))
