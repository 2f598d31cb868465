"""What happens when a handler has returned: it has done its work, and never runs again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import TestCase

from echomq_app.exceptions import InvalidPayload, InvalidResult
from echomq_app.jobs import control
from echomq_app.jobs.process_pool import ProcessPool
from echomq_app.models import Job
from echomq_app.testing import run_jobs
from tests import jobtasks, processtasks
from tests.integration.jobs import finished, history, records, running_worker
from tests.jobtasks import UNSTORABLE, marks

HOW = [jobtasks.returns, jobtasks.areturns, processtasks.returns]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return str(tmp_path / "trace")


def path_of(error: type[Exception]) -> str:
    return f"{error.__module__}.{error.__qualname__}"


@pytest.mark.django_db(transaction=True)
class TestWorker:
    @pytest.mark.parametrize("task", HOW, ids=["sync", "async", "process"])
    def test_a_result_that_cannot_be_stored_fails_the_job_at_once(
        self, task: Any, trace: str
    ) -> None:
        ids = {what: task.enqueue(what, f"{trace}-{what}").id for what in UNSTORABLE}
        with running_worker(lease=30.0, concurrency=len(UNSTORABLE)):
            for what, id in ids.items():
                job = finished(id, 60)
                assert (job.state, job.attempt, job.result) == ("failed", 1, None), what
                (error,) = job.errors
                assert error["class"] == path_of(InvalidResult)
                assert UNSTORABLE[what][1] in error["message"], error["message"]
        for what, id in ids.items():
            assert marks(f"{trace}-{what}") == ["ran"]
            assert history(id) == ["enqueued", "started", "failed"]
        assert records(ids["a date"])[-1][1]["error"]["class"] == path_of(InvalidResult)

    def test_it_can_be_run_again_by_hand(self, trace: str) -> None:
        id = jobtasks.returns.enqueue("a date", trace).id
        with running_worker():
            finished(id)
            assert control.retry(id) == "retried"
            assert finished(id).attempt == 2
        assert marks(trace) == ["ran", "ran"]

    def test_a_handler_that_returned_while_the_loop_is_torn_down_has_returned(
        self, trace: str
    ) -> None:
        ids = [
            jobtasks.returns_and_cancels_everything.enqueue(f"{trace}{number}").id
            for number in range(20)
        ]
        with running_worker(concurrency=1):
            for number, id in enumerate(ids):
                job = finished(id)
                assert (job.state, job.result) == ("completed", "done")
                assert marks(f"{trace}{number}") == ["ran"]

    def test_a_process_that_cannot_be_kept_takes_no_result_with_it(self) -> None:
        class Broken(ProcessPool):
            def _put_back(self, *args: Any, **kwargs: Any) -> None:
                super()._put_back(*args, **kwargs)
                raise OSError("no such file")

        pool = Broken(1)
        with running_worker(lease=30.0) as worker:
            worker._attempts._processes = pool
            id = processtasks.pid.enqueue().id
            assert finished(id, 60).state == "completed"
        assert Job.objects.get(pk=id).attempt == 1

    def test_arguments_that_contain_themselves_are_refused_too(self) -> None:
        with pytest.raises(InvalidPayload, match="nested deeper"):
            jobtasks.echo.enqueue(jobtasks.endless())


class TestRunJobs(TestCase):
    def test_the_same_without_a_worker(self) -> None:
        for task in HOW:
            task.enqueue("a date", "/dev/null")
        ran = run_jobs()
        assert [(result.state, result.attempts) for result in ran] == [("failed", 1)] * 3
        for result in ran:
            (error,) = result.errors
            assert error.exception_class is InvalidResult
