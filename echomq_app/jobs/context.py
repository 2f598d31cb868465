"""What a handler with `takes_context=True` gets: its token, its progress, its number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Self

from .. import cancel as cancellation
from ..cancel import CancelToken
from ..core.ids import JobId, new_job_id
from ..core.payload import storable
from ..exceptions import InvalidArgument
from ..models.job import NOTE_MAX
from .tasks_api import TaskContext, TaskResult

Report = Callable[[float, str], None]


def _nobody_listens(fraction: float, note: str) -> None:
    pass


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobContext(TaskContext):  # type: ignore[misc]  # frozen, in Django itself
    """Django's task context, and what a handler needs to stop when asked.

    `cancel` is the token: cancelled by `jobs.control.cancel`, by the job's timeout, when
    the worker shuts down, and when the worker has lost its lease. A handler that ignores
    it runs to its end, and what it returns counts.
    """

    job_id: JobId
    cancel: CancelToken
    _attempt: int = 1
    _report: Report = _nobody_listens

    @property
    def attempt(self) -> int:
        """Which attempt this is; the first is 1."""
        return self._attempt

    def check(self) -> None:
        """Raise `JobCancelled` if the job should stop. A safe point; costs nothing."""
        cancellation.check_or_raise(self.cancel)

    def progress(self, fraction: float, note: str = "") -> None:
        """Say how far the job is: 0 to 1, and a short text.

        Returns at once. The worker stores and publishes the newest of a job's reports a
        few times a second, so call it as often as you like. `note` is cut to 255
        characters. Raises `InvalidArgument` for a fraction outside 0 to 1.
        """
        if not 0 <= fraction <= 1:  # NaN isn't, either
            raise InvalidArgument(f"Progress is a fraction from 0 to 1, not {fraction!r}.")
        self._report(float(fraction), storable(str(note))[:NOTE_MAX])

    @classmethod
    def detached(cls, task_result: TaskResult) -> Self:
        """Make one where no worker is: a token that nobody cancels, progress nobody sees."""
        return cls(task_result=task_result, job_id=new_job_id(), cancel=cancellation.new())
