"""Workers whose handlers run in processes: nothing is left of them, however they end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import processtasks
from tests.acceptance.workers import StartWorker, job, starting_workers, wait_for_state
from tests.jobtasks import marks
from tests.wait import wait_until

SLOW = 60.0


@pytest.fixture
def start_worker(subprocess_env: dict[str, str]) -> Iterator[StartWorker]:
    with starting_workers(subprocess_env) as start:
        yield start


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(tmp_path / "trace")


def runs(pid: int) -> bool:
    """Tell whether a process runs; one that has ended may wait for init to take notice."""
    shown = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return bool(shown.stdout.strip()) and not shown.stdout.startswith("Z")


def started(trace: str) -> int:
    """Wait for a handler that marks its process at the end of the line; return the pid."""
    wait_until(lambda: marks(trace), SLOW, "the handler starts")
    return int(marks(trace)[0].split()[-1])


def wait_for_the_end_of(*pids: int) -> None:
    wait_until(lambda: not any(map(runs, pids)), SLOW, f"the processes {pids} end")


def test_sigkill_of_the_worker_ends_idle_and_busy_ones(
    start_worker: StartWorker, trace: str
) -> None:
    worker = start_worker("--queue", "default", "--process-concurrency", "2")
    both = [processtasks.waits_for.enqueue(f"{trace}{number}") for number in range(2)]
    pids = [started(f"{trace}{number}") for number in range(2)]
    Path(f"{trace}0.go").touch()
    wait_for_state(both[0].id, "completed")
    worker.send_signal(signal.SIGKILL)
    wait_for_the_end_of(*pids)
    assert job(both[1].id).state == "running"  # until its lease is over


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends when it lets go")
def test_sigkill_of_the_worker_ends_one_that_keeps_the_interpreter(
    start_worker: StartWorker, trace: str
) -> None:
    worker = start_worker("--queue", "default")
    processtasks.keeps_the_interpreter.enqueue(trace)
    pid = started(trace)
    worker.send_signal(signal.SIGKILL)
    try:
        wait_for_the_end_of(pid)
    finally:  # it would go on for years
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_sigquit_ends_them_too(start_worker: StartWorker, trace: str) -> None:
    worker = start_worker("--queue", "default", "--grace", "60")
    processtasks.until_cancelled.enqueue(trace, then="stay")
    pid = started(trace)
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: "cancelled shutdown shutdown" in marks(trace), SLOW)
    worker.send_signal(signal.SIGQUIT)
    assert worker.wait() == -signal.SIGQUIT
    wait_for_the_end_of(pid)


def test_signals_to_the_processes_themselves_change_nothing(
    start_worker: StartWorker, trace: str
) -> None:
    start_worker("--queue", "default")
    result = processtasks.waits_for.enqueue(trace)
    pid = started(trace)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, number)
        os.killpg(pid, number)
    Path(f"{trace}.go").touch()
    done = wait_for_state(result.id, "completed", "ready")
    assert (done.state, done.attempt, done.result) == ("completed", 1, pid)


def test_ctrl_c_asks_the_handler_and_one_that_ignores_it_is_ended(
    start_worker: StartWorker, trace: str
) -> None:
    worker = start_worker("--queue", "default", "--grace", "0.5")
    stops = processtasks.until_cancelled.enqueue(trace)
    first = started(trace)
    stays = processtasks.until_cancelled.enqueue(f"{trace}2", then="stay")
    second = started(f"{trace}2")
    os.killpg(worker.pid, signal.SIGINT)  # as a terminal does
    assert worker.wait() == 0
    assert marks(trace)[1] == marks(f"{trace}2")[1] == "cancelled shutdown shutdown"
    wait_for_the_end_of(first, second)
    for result in (stops, stays):
        left = job(result.id)
        assert (left.state, left.attempt, left.errors) == ("ready", 0, [])


def test_what_they_import_is_what_the_worker_imports(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    """The worker's path, wherever it was started from; its settings; its options."""
    worker = start_worker("--queue", "default", extra={"PYTHONPATH": str(tmp_path)})
    result = processtasks.imports.enqueue()
    seen: Any = wait_for_state(result.id, "completed").result
    path, settings, argv = seen
    assert str(tmp_path) in path
    assert settings == "tests.settings" and "echomq_worker" in argv
    assert worker.running
