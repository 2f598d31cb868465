"""Milliseconds from one process to a handler in another: to its start, and to its cancel.

    python -m tests.benchmarks latency --json
    python -m tests.benchmarks latency --json --without-fsync

From `enqueue` to the handler's first line, and from `control.cancel` to its token. With Redis
the wake-up arrives over the channel layer; without it the worker polls: for jobs every second,
for cancel requests every half second, so half of that is expected.

A start waits for the disk twice, for the commit of the enqueue and that of the claim. Without
fsync, what is left is what the programs take.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from project.children import Child
from tests.servers import private_folder, private_redis
from tests.wait import wait_until

from .databases import django_on
from .figures import alternate, compare

OURS, POLLED = "with Redis", "without Redis"
QUEUES = {OURS: "wired", POLLED: "polled"}
TIMES = 10
ROOT = Path(__file__).resolve().parent.parent.parent


def run(
    *, rounds: int, quick: bool, database: str = "postgres", without_fsync: bool = False
) -> dict[str, Any]:
    """Start and cancel jobs one by one, with and without Redis in turn."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(private_folder())
        redis = stack.enter_context(private_redis())
        os.environ["ECHOMQ_REDIS_URL"] = redis.url  # for this process, which cancels
        stack.callback(os.environ.pop, "ECHOMQ_REDIS_URL")
        stack.enter_context(django_on(database, durable=not (quick or without_fsync)))
        stack.enter_context(_worker(QUEUES[OURS], redis.url))
        stack.enter_context(_worker(QUEUES[POLLED], ""))
        number = rounds * (2 if quick else TIMES)
        cases = [
            _case("cancel", {n: partial(_cancel, q, folder) for n, q in QUEUES.items()}, number),
            _case("start", {n: partial(_start, q, folder) for n, q in QUEUES.items()}, number),
        ]
        from echomq_app import engine

        engine.stop()
    top = {key: value for key, value in cases[0].items() if key != "case"}
    return {"name": "latency", **top, "rounds": rounds, "cases": cases, "database": database}


def _case(name: str, contenders: dict[str, Callable[[], float]], number: int) -> dict[str, Any]:
    figures = alternate(contenders, number)
    p95 = {contender: round(_p95(values), 1) for contender, values in figures.items()}
    return {"case": name, **compare(figures, unit="ms", ours=OURS), "p95": p95}


def _cancel(queue: str, folder: Path) -> float:
    from echomq_app.jobs import control
    from tests.jobtasks import mark_the_cancel, marks

    trace = folder / f"{time.monotonic_ns()}"
    id = mark_the_cancel.using(queue_name=queue).enqueue(str(trace)).id
    wait_until(lambda: marks(trace), 30, "the handler runs")
    _pause()
    asked = time.monotonic()
    control.cancel(id, "measured")
    wait_until(lambda: len(marks(trace)) > 1, 30, "the handler sees the cancel")
    return (float(marks(trace)[1]) - asked) * 1000


def _start(queue: str, folder: Path) -> float:
    from tests.jobtasks import mark_the_start, marks

    trace = folder / f"{time.monotonic_ns()}"
    _pause()
    asked = time.monotonic()
    mark_the_start.using(queue_name=queue).enqueue(str(trace))
    wait_until(lambda: marks(trace), 30, "the handler runs")
    return (float(marks(trace)[0]) - asked) * 1000


def _pause() -> None:
    """Come at any moment between two polls, and not always just after one."""
    time.sleep(0.1 + time.monotonic_ns() % 500 / 1000)


def _p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.95))]


@contextlib.contextmanager
def _worker(queue: str, redis_url: str) -> Iterator[Child]:
    command = [sys.executable, "manage.py", "echomq_worker", "--queue", queue]
    env = {**os.environ, "ECHOMQ_REDIS_URL": redis_url}
    with Child(command, env=env, cwd=ROOT, name="echomq_worker") as child:
        child.wait_for_output("is ready")
        yield child
