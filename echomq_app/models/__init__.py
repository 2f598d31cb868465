"""The tables, and the statements that work on them."""

from .job import CancelRequest, Job, JobState
from .stream import Outbox, Record, Stream
from .worker import Worker

__all__ = ["CancelRequest", "Job", "JobState", "Outbox", "Record", "Stream", "Worker"]
