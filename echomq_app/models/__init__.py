"""The tables, and the statements that work on them."""

from .job import CancelRequest, Job, JobState
from .maintenance import MaintenanceTurn
from .queue import Queue
from .schedule import Schedule
from .stream import Outbox, Record, Stream
from .unique import UniqueWindow
from .worker import Worker

__all__ = [
    "CancelRequest",
    "Job",
    "JobState",
    "MaintenanceTurn",
    "Outbox",
    "Queue",
    "Record",
    "Schedule",
    "Stream",
    "UniqueWindow",
    "Worker",
]
