"""How often, how soon again, and how long: the options of a task, and where they come from.

The backend's OPTIONS are the project's defaults; `@job_options` on the function goes
over them; keyword arguments of `@task` (Django 6.1 and newer, django-tasks) go over
both. What was resolved at enqueue is stored with the job.

    @task(queue_name="mail")
    @job_options(max_attempts=5, timeout=60)
    def send(to: str) -> None: ...
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any, Self, TypeVar

from ..core import retry
from ..exceptions import InvalidArgument

_ATTRIBUTE = "__echomq_options__"
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of one job, checked. Durations are in seconds."""

    max_attempts: int = 3
    """How often a job is started at most. 1: never again after a failure or a lost worker."""

    backoff: float = 2.0
    """Before attempt n + 1, wait a random time up to `backoff * 2 ** (n - 1)`. 0: at once."""

    backoff_max: float = 3600.0
    """The longest such wait."""

    timeout: float | None = None
    """After this long the job's token is cancelled. A handler that never looks isn't stopped."""

    def __post_init__(self) -> None:
        attempts = self.max_attempts
        if type(attempts) is not int or not 1 <= attempts <= 1_000_000:
            raise InvalidArgument(f"max_attempts is a whole number from 1, not {attempts!r}.")
        for name in ("backoff", "backoff_max", "timeout"):
            value = getattr(self, name)
            if name == "timeout" and value is None:
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and 0 <= value < 1e9) or (name == "timeout" and value == 0):
                raise InvalidArgument(f"{name} is a number of seconds, not {value!r}.")

    @classmethod
    def made_of(cls, *layers: Mapping[str, Any]) -> Self:
        """Put options together; later layers win. Raises `InvalidArgument`."""
        given: dict[str, Any] = {}
        for layer in layers:
            given.update(layer)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise InvalidArgument(
                f"There is no job option {unknown[0]!r}. Known: {', '.join(sorted(known))}."
            )
        return cls(**given)

    @classmethod
    def stored_in(cls, options: Mapping[str, Any]) -> Self:
        """Read a job's `options` column. Never fails: what it can't read is the default."""
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            return cls(**{name: value for name, value in options.items() if name in known})
        except InvalidArgument:
            return cls()

    def to_store(self) -> dict[str, Any]:
        """Return what differs from the defaults, without `max_attempts` (a column)."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "max_attempts" and getattr(self, field.name) != field.default
        }

    def retry_delay(self, attempt: int, rnd: Callable[[], float] = random.random) -> float:
        """Return the seconds between the end of `attempt` and the next one."""
        if not self.backoff or not self.backoff_max:
            return 0.0
        base = min(self.backoff, self.backoff_max)
        return retry.full_jitter(attempt, base=base, cap=self.backoff_max, random=rnd)


def job_options(**options: Any) -> Callable[[T], T]:
    """Set `max_attempts`, `backoff`, `backoff_max`, `timeout` for a task.

    Stands above or below `@task`, and works with every backend and every Django. Checked
    here, at import: raises `InvalidArgument`.
    """
    JobOptions.made_of(options)

    def decorate(target: T) -> T:
        function = getattr(target, "func", target)
        setattr(function, _ATTRIBUTE, {**declared(function), **options})
        return target

    return decorate


def declared(function: Any) -> Mapping[str, Any]:
    """Return what `@job_options` said about a function."""
    found: Mapping[str, Any] = getattr(function, _ATTRIBUTE, {})
    return found
