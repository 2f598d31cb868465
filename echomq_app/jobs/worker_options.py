"""How a worker works: checked before it touches anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..core.names import check_queue_name
from ..core.payload import encode
from ..exceptions import InvalidArgument

CONCURRENCY_MAX = 10_000
SECONDS_MAX = 1e9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """How a worker works; durations in seconds. Raises `InvalidArgument`, `InvalidName`, and
    `InvalidPayload` for a `name` that can't be stored."""

    queues: tuple[str, ...]
    concurrency: int = 10
    process_concurrency: int | None = None
    """How many processes for handlers with `process=True` at most. None: one per CPU."""
    grace: float = 30.0
    """How long running jobs may go on after the first signal."""
    poll: float = 1.0
    """How often to look for work that nobody notified of."""
    lease: float = 30.0
    heartbeat: float = 5.0
    drain: bool = False
    """End when there is nothing to do any more."""
    name: str = ""
    max_jobs: int | None = None
    """End in good order after so many jobs."""
    max_rss: int | None = None
    """End in good order when the process holds more than so many MiB of memory."""
    parent: int | None = None
    """The process that supervises this one: without it, the worker stops."""
    weights: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """How queues share the worker; 1 where nothing is said."""

    def __post_init__(self) -> None:
        if not self.queues:
            raise InvalidArgument("A worker needs at least one queue.")
        for queue in self.queues:
            check_queue_name(queue)
        encode(self.name, what="name")
        self._check_counts()
        self._check_times()

    def _check_counts(self) -> None:
        for name in ("concurrency", "process_concurrency"):
            count = getattr(self, name)
            if count is not None and not 1 <= count <= CONCURRENCY_MAX:
                raise InvalidArgument(f"{name} is 1 to {CONCURRENCY_MAX:,}, not {count}.")
        for name in ("max_jobs", "max_rss"):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise InvalidArgument(f"{name} is 1 or more, not {limit}.")
        for queue, weight in self.weights.items():
            if queue not in self.queues or not 1 <= weight <= 1_000:
                raise InvalidArgument(
                    f"A weight is for one of the worker's queues, 1 to 1,000; not {queue}:{weight}."
                )

    def _check_times(self) -> None:
        for name in ("poll", "lease", "heartbeat"):
            if not 0 < getattr(self, name) < SECONDS_MAX:
                raise InvalidArgument(
                    f"{name} is a number of seconds above 0, not {getattr(self, name)!r}."
                )
        if not 0 <= self.grace < SECONDS_MAX:
            raise InvalidArgument(f"grace is a number of seconds from 0, not {self.grace!r}.")
        if self.lease < 3 * self.heartbeat:
            raise InvalidArgument(
                f"A lease of {self.lease:g} s is shorter than three heartbeats of "
                f"{self.heartbeat:g} s: one late heartbeat would lose every job. Make the lease "
                "longer or the heartbeats closer."
            )

    @property
    def patience(self) -> float:
        """How long a statement of the worker's own may take before its connection is cut.

        A heartbeat that hangs has to be noticed while there is still time for another.
        """
        return max(1.0, self.lease / 3)
