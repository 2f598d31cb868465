from __future__ import annotations

from echomq_app.jobs.tasks_api import task


@task
def pack(item: str) -> str:
    return f"{item}, packed"
