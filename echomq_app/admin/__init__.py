"""Pages in Django's own admin; registered when the project has `django.contrib.admin`."""

from .jobs import JobAdmin
from .records import RecordAdmin
from .streams import StreamAdmin
from .workers import WorkerAdmin

__all__ = ["JobAdmin", "RecordAdmin", "StreamAdmin", "WorkerAdmin"]
