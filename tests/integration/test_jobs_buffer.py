"""Jobs that were claimed ahead and wait in the worker: they go on, or others get them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from echomq_app.core.prefetch import Prefetch
from echomq_app.jobs import attempts, control
from echomq_app.models import Job
from tests import jobtasks
from tests.integration.jobs import finished, history, running_worker
from tests.jobtasks import marks
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def five_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers claim five ahead, as if jobs were short, until they had to give some back."""
    slow = set[int]()
    monkeypatch.setattr(Prefetch, "ahead", lambda self, *rate: 0 if id(self) in slow else 5)
    monkeypatch.setattr(Prefetch, "forget", lambda self: slow.add(id(self)))


@pytest.fixture
def held(trace: str) -> Iterator[Any]:
    """Give a function that enqueues a job whose handler runs until it is cancelled."""
    ids = []

    def hold() -> str:
        ids.append(jobtasks.until_cancelled.enqueue(trace).id)
        return ids[-1]

    yield hold
    for id in ids:
        control.cancel(id)


@pytest.fixture
def trace(tmp_path: Any) -> str:
    return str(tmp_path / "trace")


def waiting(number: int) -> list[str]:
    return [jobtasks.noop.enqueue(n).id for n in range(number)]


def claimed(ids: list[str]) -> bool:
    return Job.objects.filter(pk__in=ids, state="running").count() == len(ids)


def test_handlers_go_on_with_what_waits_in_their_order(trace: str, held: Any) -> None:
    first = held()
    with running_worker(concurrency=1):
        wait_until(lambda: marks(trace))
        low = [jobtasks.note.using(priority=n).enqueue(f"{trace}-order").id for n in (1, 3, 2)]
        wait_until(lambda: claimed(low))
        assert not marks(f"{trace}-order")
        control.cancel(first)
        done = [finished(id) for id in low]
    assert [job.attempt for job in done] == [1, 1, 1]
    by_time = sorted(done, key=lambda job: job.finished_at)  # type: ignore[arg-type, return-value]
    assert [job.priority for job in by_time] == [3, 2, 1]


def test_what_waits_too_long_is_given_to_others(
    trace: str, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "STALE", 0.2)
    first = held()
    with running_worker(concurrency=1, name="slow"):
        wait_until(lambda: marks(trace))
        ids = waiting(4)
        wait_until(lambda: claimed(ids))
        with running_worker(concurrency=4, name="quick"):
            done = [finished(id) for id in ids]
        assert {job.worker_name for job in done} == {"quick"}
        assert [job.attempt for job in done] == [1] * 4
        assert [history(id) for id in ids] == [["enqueued", "started", "completed"]] * 4
        assert Job.objects.get(pk=first).state == "running"
        control.cancel(first)
        finished(first)


def test_a_worker_that_stops_hands_back_what_waits_at_once(trace: str, held: Any) -> None:
    held()
    with running_worker(concurrency=1, grace=30) as worker:
        wait_until(lambda: marks(trace))
        ids = waiting(4)
        wait_until(lambda: claimed(ids))
        worker.stop()
    rows = Job.objects.filter(pk__in=ids)
    assert {(job.state, job.attempt, job.worker_id) for job in rows} == {("ready", 0, None)}


def test_cancelled_while_it_waits_it_never_begins(trace: str, held: Any) -> None:
    first = held()
    with running_worker(concurrency=1):
        wait_until(lambda: marks(trace))
        id = jobtasks.note.enqueue(f"{trace}-never").id
        wait_until(lambda: claimed([id]))
        assert control.cancel(id, "not needed") == "requested"
        control.cancel(first)
        job = finished(id)
    assert (job.state, job.cancel_reason) == ("cancelled", "not needed")
    assert not marks(f"{trace}-never")
