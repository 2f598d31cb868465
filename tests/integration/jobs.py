"""What the integration tests of jobs share: the feed as a list, and hand-made claims."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from django.db import connection, connections

from echomq_app import engine, events
from echomq_app.core.ids import JobId, new_job_id
from echomq_app.core.names import events_group
from echomq_app.jobs import begins
from echomq_app.jobs.claims import ClaimedJob, Claims
from echomq_app.jobs.outcomes import Ending, Outcome
from echomq_app.jobs.running import RunningJob
from echomq_app.jobs.worker import Worker as JobWorker
from echomq_app.jobs.worker_options import WorkerOptions
from echomq_app.models import Job, Worker
from echomq_app.models.times import now
from echomq_app.stream import Stream
from tests.wait import wait_until

USING = "default"


class Heard(list[events.Event]):
    """Events of a queue, as they were published."""

    def __init__(self, queue: str) -> None:
        super().__init__()
        self.queue = queue

    def deliver(self, message: Mapping[str, Any]) -> None:
        if "events" in message:
            self.extend(events.unpack(message))

    def gap(self, reason: str) -> None:
        pass

    def so_far(self) -> list[events.Event]:
        """Return what was published up to now, however long it takes to arrive."""
        marker = new_job_id()
        events.publish(self.queue, "marker", marker)
        wait_until(lambda: any(event.job_id == marker for event in self))
        return [event for event in self if event.event != "marker"]

    def names(self) -> list[str]:
        return [event.event for event in self.so_far()]


@contextlib.contextmanager
def hearing(queue: str = "default") -> Iterator[Heard]:
    """Collect what is published on a queue's feed in this process."""
    heard = Heard(queue)
    engine.add_sink(heard, (events_group(queue),))
    try:
        heard.so_far()
        heard.clear()
        yield heard
    finally:
        engine.remove_sink(heard, (events_group(queue),))


def register(name: str = "w1", lease: float = 30.0) -> Worker:
    """Write a worker's row."""
    return Worker.objects.register(
        name=name, host="here", pid=1, queues=["default"], concurrency=1, lease=lease
    )


def claim(
    worker: Worker, limit: int = 1, queue: str = "default", *, begun: bool = True
) -> list[ClaimedJob]:
    """Claim from the front, as a worker does, and count the attempts, as before a handler."""
    claimed = Claims(USING).take(queue, worker_id=worker.pk, worker_name=worker.name, limit=limit)
    if begun and claimed:
        begins.begin(USING, [RunningJob(job) for job in claimed])
    return claimed


def outcome(job: ClaimedJob | Job, ending: Ending = Ending.RETURNED, **more: Any) -> Outcome:
    """Make the outcome of a claimed job."""
    given: dict[str, Any] = {
        "options": job.options,
        "errors": job.errors,
        "result": "1" if ending is Ending.RETURNED else None,
    }
    return Outcome(
        id=JobId.parse(job.id),
        queue=job.queue,
        task_path=job.task_path,
        fence=job.fence,
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        ending=ending,
        at=now(),
        claimed=job if isinstance(job, ClaimedJob) else ClaimedJob.of(job),
        **{**given, **more},
    )


@contextlib.contextmanager
def running_worker(**options: Any) -> Iterator[JobWorker]:
    """Run a worker in a thread of this process, and stop it after the block."""
    defaults: dict[str, Any] = {
        "queues": ("default",),
        "poll": 0.1,
        "lease": 2.0,
        "heartbeat": 0.3,
        "grace": 5.0,
        "concurrency": 4,
    }
    begun = threading.Event()
    worker = JobWorker(
        WorkerOptions(**{**defaults, **options}), on_started=lambda name: begun.set()
    )

    def run() -> None:
        try:
            worker.run()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, name="worker")
    thread.start()
    try:
        wait_until(lambda: begun.is_set() or not thread.is_alive(), 20, "the worker begins")
        yield worker
    finally:
        worker.stop()
        thread.join(30)
        assert not thread.is_alive()


def finished(id: str, timeout: float = 20.0) -> Job:
    """Wait for the end of a job, and return it."""
    wait_until(lambda: Job.objects.get(pk=id).is_finished, timeout, f"{id} ends")
    return Job.objects.get(pk=id)


def records(job_id: str, queue: str = "default") -> list[tuple[str, dict[str, Any]]]:
    """Return what the log says about a job, after the relay."""
    stream = Stream(f"emq.{queue}")
    wait_until(lambda: stream.relay() == 0)  # None: somebody else is at it
    return [(record.type, record.data) for record in stream.read(key=job_id).records]


def stored_id(job_id: str) -> str:
    """Return a job's id as SQL has it, quoted."""
    number = uuid.UUID(int=JobId.parse(job_id).int)
    return f"'{number}'" if connection.vendor == "postgresql" else f"'{number.hex}'"


def history(job_id: str, queue: str = "default") -> list[str]:
    """Name what the log says about a job."""
    return [type for type, _ in records(job_id, queue)]


class OtherRouter:
    """Keeps the app in the second database."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "echomq" else None

    db_for_write = db_for_read
