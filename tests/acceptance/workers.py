"""Workers as processes, for the tests that signal and kill them."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from django.db import connections

from echomq_app.models import Job
from project.children import Child
from tests.wait import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent

# Two seconds of silence and the jobs are somebody else's; looks for work all the time.
FAST = ("--lease", "2", "--heartbeat", "0.4", "--poll", "0.1")

StartWorker = Callable[..., Child]


@contextlib.contextmanager
def starting_workers(env: Mapping[str, str]) -> Iterator[StartWorker]:
    """Give a function that starts `echomq_worker`; all are stopped after the block."""
    with contextlib.ExitStack() as stack:

        def start(
            *options: str, ready: bool = True, extra: Mapping[str, str] | None = None
        ) -> Child:
            child = Child(
                [sys.executable, "manage.py", "echomq_worker", *FAST, *options],
                env={**env, **(extra or {})},
                cwd=ROOT,
                name="echomq_worker",
            )
            stack.enter_context(child)
            if ready:
                child.wait_for_output(r"Worker .* is ready")
            return child

        yield start


def press_until_it_ends(worker: Child) -> None:
    """Press Ctrl-C as a person does who has enough of waiting."""

    def pressed() -> bool:
        if worker.running:
            worker.send_signal(signal.SIGINT)
        return not worker.running

    wait_until(pressed, 20, "the worker ends", poll=0.2)


def job(job_id: str) -> Job:
    """Read a job."""
    return Job.objects.get(pk=job_id)


def wait_for_state(job_id: str, *states: str, timeout: float = 30.0) -> Job:
    """Wait until a job is in one of these states."""

    def reached() -> Job | None:
        found = job(job_id)
        return found if found.state in states else None

    found = wait_until(reached, timeout, f"job {job_id} is {' or '.join(states)}")
    connections.close_all()
    assert found is not None
    return found
