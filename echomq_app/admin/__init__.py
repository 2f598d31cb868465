"""Pages in Django's own admin; registered when the project has `django.contrib.admin`."""

from .jobs import JobAdmin
from .queues import QueueAdmin
from .records import RecordAdmin
from .schedules import ScheduleAdmin
from .streams import StreamAdmin
from .workers import WorkerAdmin

__all__ = [
    "JobAdmin",
    "QueueAdmin",
    "RecordAdmin",
    "ScheduleAdmin",
    "StreamAdmin",
    "WorkerAdmin",
]
