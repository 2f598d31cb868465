"""The task of the chaos test."""

from __future__ import annotations

from django.db import transaction

from echomq_app.jobs.context import JobContext
from echomq_app.jobs.options import job_options
from echomq_app.jobs.tasks_api import task
from echomq_app.stream import Stream


@task(takes_context=True)
@job_options(max_attempts=1_000, backoff=0.1, backoff_max=0.5)
def append_an_effect(context: JobContext, seconds: float, fails: bool = False) -> None:
    """Take a moment, then append one record, in a transaction of the job's own."""
    context.progress(0.5)
    context.cancel.wait(seconds)
    context.check()
    with transaction.atomic():
        Stream("effects").append({"attempt": context.attempt}, key=str(context.job_id))
        if fails and context.attempt < 2:
            raise ValueError("as asked: nothing was appended")
