"""What a handler with `takes_context=True` gets: its token, its progress, its number."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Self, SupportsFloat, overload

from django.utils.functional import Promise

from .. import cancel as cancellation
from ..cancel import CancelToken
from ..core.ids import JobId, new_job_id
from ..core.payload import storable
from ..models.job import NOTE_MAX
from .tasks_api import TaskContext, TaskResult

logger = logging.getLogger("echomq.jobs")

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
    _warned: list[bool] = dataclasses.field(default_factory=list, repr=False)

    @property
    def attempt(self) -> int:
        """Which attempt this is; the first is 1."""
        return self._attempt

    def check(self) -> None:
        """Raise `JobCancelled` if the job should stop. A safe point; costs nothing."""
        cancellation.check_or_raise(self.cancel)

    @overload
    def progress(self, done: SupportsFloat, note: str, /) -> None: ...
    @overload
    def progress(self, done: SupportsFloat, *, note: str = ...) -> None: ...
    @overload
    def progress(self, done: SupportsFloat, total: SupportsFloat, note: str = ...) -> None: ...
    def progress(self, done: Any, total: Any = None, note: Any = "") -> None:
        """Report how far the job is, as a fraction or as `done` of `total`, and a short text.

            context.progress(0.25, "halfway to the middle")
            context.progress(number, len(readers), reader.name)

        Never raises and never waits: a report can't fail the job. A fraction below 0 is
        stored as 0, above 1 as 1, and NaN as 0; 0 of 0 is 1. `note` is cut to 255 characters.
        What is not a number is dropped, with one warning in the log for each attempt. The worker
        stores and publishes the newest report a few times a second, so call it as often as
        you like.
        """
        if isinstance(total, str | Promise):
            total, note = None, total
        try:
            text = storable(str(note)[:NOTE_MAX])
            self._report(_fraction(done, 1 if total is None else total), text)
        except Exception as error:
            if not self._warned:
                self._warned.append(True)
                logger.warning(
                    "event=progress_failed job=%s attempt=%d error=%r",
                    *(self.job_id, self._attempt, error),
                    exc_info=error,
                )

    @classmethod
    def detached(cls, task_result: TaskResult) -> Self:
        """Make one where no worker is: a token that nobody cancels, progress nobody sees."""
        return cls(task_result=task_result, job_id=new_job_id(), cancel=cancellation.new())


def _fraction(done: Any, total: Any) -> float:
    """Return `done / total` from 0 to 1. Raises what comparing or dividing them raises."""
    if total <= 0 or done >= total:
        return 1.0
    found = float(done) / float(total)
    return found if 0 < found < 1 else 0.0  # NaN is neither
