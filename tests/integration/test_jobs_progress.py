"""Reports of progress fail no job, whatever they say and wherever the handler runs."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import TestCase

from echomq_app.core.ids import new_job_id
from echomq_app.jobs import journal
from echomq_app.models import Job
from echomq_app.testing import capture_events, run_jobs
from tests import jobtasks, processtasks
from tests.integration.jobs import finished, running_worker

HOW = [jobtasks.reports_oddly, jobtasks.areports_oddly, processtasks.reports_oddly]


def warnings(caplog: pytest.LogCaptureFixture, id: str) -> list[str]:
    about = [record for record in caplog.records if id in record.getMessage()]
    return [record.levelname for record in about if "progress_failed" in record.getMessage()]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("task", HOW, ids=["sync", "async", "process"])
def test_in_a_worker(task: Any, caplog: pytest.LogCaptureFixture) -> None:
    id = task.enqueue().id
    with running_worker(lease=30.0):
        job = finished(id, 60)
    assert (job.state, job.attempt, job.result) == ("completed", 1, "done")
    assert (job.progress, job.progress_note) == (1.0, "nothing to do")
    if task is not processtasks.reports_oddly:  # that has a log of its own
        assert warnings(caplog, id) == ["WARNING"]


class TestRunJobs(TestCase):
    @pytest.fixture(autouse=True)
    def _log(self, caplog: pytest.LogCaptureFixture) -> None:
        self.caplog = caplog

    def test_the_same_without_a_worker(self) -> None:
        for task in HOW:
            with capture_events() as events:
                id = task.enqueue().id
                (ran,) = run_jobs()
            assert (ran.state, ran.return_value, ran.attempts) == ("completed", "done", 1)
            assert (ran.progress, ran.progress_note) == (1.0, "nothing to do")
            told: list[Any] = [event.data for event in events if event.event == "progress"]
            assert [one["fraction"] for one in told] == [0.0, 1.0, 1.0]
            assert told[0]["note"] == "a\N{REPLACEMENT CHARACTER}?b" and len(told[1]["note"]) == 255
            assert warnings(self.caplog, id) == ["WARNING"]

    def test_within_a_transaction_that_takes_nothing_any_more(self) -> None:
        id = jobtasks.reports_in_a_broken_transaction.enqueue().id
        (ran,) = run_jobs()
        assert (ran.state, ran.progress) == ("completed", 0.5)
        assert Job.objects.get(pk=id).attempt == 1


@pytest.mark.django_db
def test_what_cannot_be_published_takes_nothing_else_with_it() -> None:
    at = {"state": "running", "attempt": 1, "at": None}
    ids = [new_job_id(), new_job_id()]
    notes = ["a lone \ud800", "fine"]
    entries = [
        journal.Entry("default", journal.PROGRESS, id, {"id": str(id), "note": note, **at})
        for id, note in zip(ids, notes, strict=True)
    ]
    with capture_events() as events:
        journal.publish(entries)
    assert [str(event.job_id) for event in events] == [str(ids[1])]
