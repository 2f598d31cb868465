"""One SQLite file, four worker processes and a web process that write to it at once."""

from __future__ import annotations

import pytest
from django.db import transaction

from echomq_app.models import Job
from echomq_app.stream import Stream
from tests.acceptance.projects.appending import STREAM, read_then_append
from tests.acceptance.workers import starting_workers

JOBS = 80


@pytest.mark.sqlite
def test_nobody_hears_that_the_database_is_locked(subprocess_env: dict[str, str]) -> None:
    with starting_workers(subprocess_env) as start:
        workers = [start("--queue", "default", "--concurrency", "3") for _ in range(4)]
        with transaction.atomic():
            for n in range(JOBS):
                read_then_append.enqueue(n)
        web = 0
        while Job.objects.finished().count() < JOBS:
            with transaction.atomic():  # a request: reads, then writes
                Stream("web").append({"n": web, "done": Job.objects.finished().count()})
            web += 1
        for worker in workers:
            assert worker.stop() == 0, worker.output
            assert "locked" not in worker.output
    assert set(Job.objects.values_list("state", flat=True)) == {"completed"}
    assert set(Job.objects.values_list("attempt", flat=True)) == {1}
    assert sorted(record.data["n"] for record in Stream(STREAM).replay()) == list(range(JOBS))
    assert [record.data["n"] for record in Stream("web").replay()] == list(range(web))
    types = [record.type for record in Stream("emq.default").replay()]
    assert [types.count(name) for name in ("enqueued", "started", "completed")] == [JOBS] * 3
