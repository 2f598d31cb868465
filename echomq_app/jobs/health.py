"""What a probe asks: is the database there, do workers live, does anything wait for too long."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Collection, Iterator
from typing import Any

from django.db import DatabaseError, connections, router
from django.db.migrations.executor import MigrationExecutor
from django.db.models import Min
from django.utils import timezone

from ..models import sql
from ..models.job import Job, JobQuerySet, JobState
from ..models.queue import Queue
from ..models.relaying import count_waiting
from ..models.times import now_as_django
from ..models.worker import Worker
from .backend import EchoMQBackend
from .tasks_api import task_backends

_APP = "echomq"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From where on something is a problem. Times in seconds; None: it never is."""

    max_age: float | None = None
    """Of the oldest job that may be claimed, in a queue that isn't paused."""
    max_backlog: int | None = None
    """Of records that wait in the outbox."""
    min_workers: int = 0
    """That live, for each queue."""
    worker: str | None = None
    """The name of a worker that has to live."""


def report(queues: Collection[str] = (), limits: Limits | None = None) -> dict[str, Any]:
    """Look once; `ok` is False if there is a `problem`. Raises nothing that the database does.

    `queues`: which to look at; by default those of the TASKS backends, and those that living
    workers serve.
    """
    limits = limits or Limits()
    using = router.db_for_write(Job)
    found: dict[str, Any] = {"ok": False, "problems": [], "database": "ok"}
    problems: list[str] = found["problems"]
    try:
        found["migrations"] = _missing(using)
        if found["migrations"]:
            problems.append(f"not migrated: {', '.join(found['migrations'])}")
        else:
            found["queues"] = _queues(using, queues, limits, problems)
            found["outbox"] = _backlog(using, limits.max_backlog, problems)
            _look_for_worker(using, limits.worker, problems)
    except DatabaseError as error:
        found["database"] = " ".join(str(error).split())
        problems.append("the database can't be used")
    found["ok"] = not problems
    return found


def _missing(using: str) -> list[str]:
    """Name our migrations that were not applied, and the SQL objects that aren't there."""
    connection = connections[using]
    executor = MigrationExecutor(connection)
    plan = executor.migration_plan(executor.loader.graph.leaf_nodes(_APP))
    steps = [migration.name for migration, _ in plan if migration.app_label == _APP]
    return steps or sql.missing(connection)


def _alive(using: str) -> list[Worker]:
    workers = Worker.objects.using(using).filter(lost_at=None, stopped_at=None)
    # By the real clock, as leases are renewed.
    return list(workers.filter(expires_at__gt=timezone.now()))


def _queues(
    using: str, names: Collection[str], limits: Limits, problems: list[str]
) -> dict[str, dict[str, Any]]:
    alive = _alive(using)
    if not names:
        backends = [one for one in task_backends.all() if isinstance(one, EchoMQBackend)]
        names = {name for one in backends for name in one.queues}
        names |= {name for worker in alive for name in worker.queues}
    paused = set(Queue.objects.using(using).paused().values_list("pk", flat=True))
    found = {}
    for name in sorted(names):
        workers = sum(name in worker.queues for worker in alive)
        age = None if name in paused else _oldest(using, name)
        found[name] = {"workers": workers, "paused": name in paused, "oldest_ready": age}
        if workers < limits.min_workers:
            problems.append(f"queue {name} has {workers} workers alive")
        if age is not None and limits.max_age is not None and age > limits.max_age:
            problems.append(f"queue {name} has a job that has waited for {age:.0f} s")
    return found


def _oldest(using: str, queue: str) -> float | None:
    """Return for how long the oldest job has been due; None if none is."""
    at = now_as_django()
    jobs = Job.objects.using(using).filter(queue=queue)
    scheduled = jobs.due(at).aggregate(first=Min("run_after"))["first"]
    due = [*_first_ready(jobs), *([] if scheduled is None else [scheduled])]
    return max(0.0, (at - min(due)).total_seconds()) if due else None


def _first_ready(jobs: JobQuerySet) -> Iterator[dt.datetime]:
    """Yield when the first of each priority was due.

    A step through the index for each: of a million ready jobs, most have the same.
    """
    ready = jobs.filter(state=JobState.READY, parked=False).order_by("-priority", "run_after")
    found = ready.values_list("priority", "run_after").first()
    while found is not None:
        priority, moment = found
        yield moment
        found = ready.filter(priority__lt=priority).values_list("priority", "run_after").first()


def _backlog(using: str, most: int | None, problems: list[str]) -> int:
    """Count what waits in the outbox, and not much more than it takes to say too many."""
    enough = 10_000 if most is None else most + 1
    count = count_waiting(using, enough)
    if most is not None and count > most:
        problems.append(f"more than {most} records wait in the outbox")
    return count


def _look_for_worker(using: str, name: str | None, problems: list[str]) -> None:
    if name is not None and name not in {worker.name for worker in _alive(using)}:
        problems.append(f"worker {name} has no lease")
