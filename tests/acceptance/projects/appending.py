"""A task that reads the log, decides, and appends: what collides on SQLite if anything does."""

from __future__ import annotations

from django.db import transaction

from echomq_app.exceptions import UnknownStream
from echomq_app.jobs.tasks_api import task
from echomq_app.stream import Stream

STREAM = "work"


@task
def read_then_append(n: int) -> int:
    with transaction.atomic():
        try:
            cursor = Stream(STREAM).info().write_cursor
        except UnknownStream:
            cursor = 0
        return Stream(STREAM).append({"n": n}, expected_cursor=cursor).position
