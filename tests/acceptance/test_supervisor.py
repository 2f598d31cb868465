"""`echomq_worker --processes N`: real processes, ended and killed for real."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from echomq_app.jobs.supervisor import PARENT
from echomq_app.models import Job, Worker
from tests import jobtasks
from tests.acceptance.workers import (
    StartWorker,
    press_until_it_ends,
    starting_workers,
    wait_for_state,
)
from tests.jobtasks import marks
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def start_worker(subprocess_env: dict[str, str]) -> Iterator[StartWorker]:
    with starting_workers(subprocess_env) as start:
        yield start


def pids() -> set[int]:
    """Return the processes of the workers that live, by what the database says."""
    return set(Worker.objects.filter(stopped_at=None, lost_at=None).values_list("pid", flat=True))


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_was_killed_is_replaced_and_all_stop_together(
    start_worker: StartWorker,
) -> None:
    parent = start_worker("--queue", "default", "--processes", "2")
    wait_until(lambda: len(pids()) == 2)
    first = pids()
    assert parent.pid not in first
    os.kill(min(first), signal.SIGKILL)
    wait_until(lambda: len(pids() - first) == 1, message="another one in its place")
    wait_for_state(jobtasks.add.enqueue(1, 2).id, "completed")
    every = first | pids()
    assert parent.stop(grace=60) == 0
    assert not any(is_there(pid) for pid in every)
    assert "worker_process_failed" in parent.output


@pytest.mark.parametrize(
    ("number", "receivers"),
    [
        pytest.param(signal.SIGTERM, "every process", id="systemd, Heroku"),
        pytest.param(signal.SIGTERM, "the parent twice", id="docker stop with a shell"),
        pytest.param(signal.SIGTERM, "the parent's group and every process", id="a runner"),
        pytest.param(signal.SIGINT, "the parent's group and every process", id="Ctrl-C"),
    ],
)
def test_a_stop_is_one_stop_however_often_it_is_asked_for(
    number: signal.Signals, receivers: str, start_worker: StartWorker, tmp_path: Path
) -> None:
    trace = str(tmp_path / "trace")
    parent = start_worker("--queue", "default", "--processes", "1", "--grace", "2")
    ids = [jobtasks.until_cancelled.enqueue(trace, then).id for then in ("stop", "stay")]
    wait_until(lambda: marks(trace) == ["start 1"] * 2)
    (child,) = pids()

    def ask() -> None:
        if "group" in receivers:
            os.killpg(parent.pid, number)
        parent.send_signal(number)
        if "every" in receivers:
            os.kill(child, number)

    ask()
    wait_until(lambda: len(marks(trace)) == 4, message="the handlers are asked to stop")
    ask()
    assert parent.wait(60) == 0
    assert set(Job.objects.values_list("state", "attempt")) == {("ready", 0)}
    assert Job.objects.filter(pk__in=ids).count() == 2
    assert Worker.objects.get().stopped_at is not None


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_stop_before_the_workers_are_ready(start_worker: StartWorker) -> None:
    parent = start_worker("--queue", "default", "--processes", "2", ready=False)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    wait_until(lambda: len(children.read_text().split()) == 2)
    assert parent.stop(grace=60) == 0


def test_ctrl_c_again_ends_all_at_once(start_worker: StartWorker, tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")
    parent = start_worker("--queue", "default", "--processes", "1", "--grace", "60")
    id = jobtasks.until_cancelled.enqueue(trace, "stay").id
    wait_until(lambda: marks(trace))
    (child,) = pids()
    press_until_it_ends(parent)
    assert parent.wait() == 128 + signal.SIGQUIT
    assert not is_there(child)
    assert Job.objects.get(pk=id).state == "running"


def test_without_the_parent_the_workers_stop(start_worker: StartWorker) -> None:
    parent = start_worker("--queue", "default", "--processes", "2")
    wait_until(lambda: len(pids()) == 2)
    every = pids()
    os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not any(is_there(pid) for pid in every), 60, "the workers end")
    assert not pids()


def test_each_ends_after_so_many_jobs_and_is_replaced(start_worker: StartWorker) -> None:
    ids = [jobtasks.add.enqueue(n, n).id for n in range(7)]
    parent = start_worker("--queue", "default", "--processes", "1", "--max-jobs", "3")
    for id in ids:
        wait_for_state(id, "completed", timeout=60)
    by_worker = list(Job.objects.values_list("worker_name", flat=True))
    assert sorted(by_worker.count(name) for name in set(by_worker)) == [1, 3, 3]
    assert parent.stop(grace=60) == 0


def test_drained_workers_are_not_replaced(start_worker: StartWorker) -> None:
    ids = [jobtasks.add.enqueue(n, n).id for n in range(5)]
    parent = start_worker("--queue", "default", "--processes", "2", "--drain", ready=False)
    assert parent.wait(60) == 0
    assert set(Job.objects.filter(pk__in=ids).values_list("state", flat=True)) == {"completed"}


def test_too_much_memory_ends_a_worker_in_good_order(start_worker: StartWorker) -> None:
    worker = start_worker("--queue", "default", "--max-rss", "300")
    id = jobtasks.keep_memory.enqueue(400).id
    assert worker.wait(60) == 0
    # What it had claimed it finished.
    assert Job.objects.get(pk=id).state == "completed"
    assert re.search(r"Worker .* ends after \d+ MiB of memory\.", worker.output)


def test_a_limit_below_what_a_worker_holds_at_its_start_is_refused(
    start_worker: StartWorker,
) -> None:
    """Else it would be started again and again, as fast as the machine can."""
    worker = start_worker("--queue", "default", "--max-rss", "1", ready=False)
    assert worker.wait(60) == 3
    assert "Raise the limit" in worker.output and "Traceback" not in worker.output


def test_a_child_never_supervises_in_turn(start_worker: StartWorker) -> None:
    """Whatever its command says: an option that wasn't taken out would start workers for ever."""
    parent = {PARENT: str(os.getpid())}
    worker = start_worker("--queue", "default", "--processe", "2", ready=False, extra=parent)
    wait_until(lambda: pids() == {worker.pid})
    jobtasks.environment.enqueue(PARENT)
    wait_until(lambda: Job.objects.get().is_finished)
    assert Job.objects.get().result is None  # what a handler starts is no child of that parent's
    assert worker.stop(grace=60) == 0
