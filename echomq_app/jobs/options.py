"""How often, how long, how many at once: the options of a job, and where they come from.

The backend's OPTIONS are the project's defaults; `@job_options` on the function goes
over them; keyword arguments of `@task` (Django 6.1 and newer, django-tasks) go over
both, and those of `.using()`, for one enqueue, over all. What was resolved at enqueue is
stored with the job.

    @task(queue_name="mail")
    @job_options(max_attempts=5, timeout=60, unique=True)
    def send(to: str) -> None: ...

    send.using(unique="welcome:7").enqueue("me@example.org")
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any, Self, TypedDict, TypeVar, Unpack

import msgspec

from ..core import retry
from ..core.payload import encode
from ..exceptions import InvalidArgument, InvalidPayload

_ATTRIBUTE = "__echomq_options__"
KEY_MAX = 200
"""Characters of a key that a project gives: of `unique` or `group`."""
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

    unique: bool | str = False
    """True: one job for the task and its arguments; a text: one job for that key, whatever its
    task. A second enqueue gives the first job."""

    unique_for: float | None = None
    """For this long from the enqueue. None: while the job waits or runs."""

    group: str = ""
    """Jobs of a group, of any task and in any queue, share a limit of how many run at once."""

    concurrency: int | None = None
    """That limit; 1 unless given. Without `group` it is the task's own."""

    process: bool = False
    """Run the handler in a process of its own, which a worker keeps for such jobs."""

    retention: float | None = None
    """How long the row stays when the job has ended. None: until somebody prunes it."""

    def __post_init__(self) -> None:
        for name, default in (("max_attempts", False), ("concurrency", True)):
            count = getattr(self, name)
            if count is None and default:
                continue
            if type(count) is not int or not 1 <= count <= 1_000_000:
                raise InvalidArgument(f"{name} is a whole number from 1, not {count!r}.")
        for name in ("backoff", "backoff_max", "timeout", "unique_for", "retention"):
            value = getattr(self, name)
            if value is None and name not in ("backoff", "backoff_max"):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool)
            above = name in ("timeout", "unique_for")
            if not (number and 0 <= value < 1e9) or (above and value == 0):
                raise InvalidArgument(f"{name} is a number of seconds, not {value!r}.")
        if type(self.process) is not bool:
            raise InvalidArgument(f"process is True or False, not {self.process!r}.")
        if self.unique is not True and self.unique is not False:
            _check_key("unique", self.unique, "True, False, or a key")
        if self.group != "":
            _check_key("group", self.group, "a key")
        window, kept = self.unique_for, self.retention
        if window is not None and kept is not None and kept < window:
            raise InvalidArgument(
                f"retention={kept!r} is shorter than unique_for={window!r}: "
                "the job would be gone that a second enqueue has to give. Make it as long."
            )

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

    def unique_key(self, task_path: str, arguments: Mapping[str, Any]) -> str:
        """Return what a unique job is known by; "" for one that isn't unique.

        `arguments`: `{"args": [...], "kwargs": {...}}`. The order of keywords doesn't matter,
        but whether an argument was given by its name does.
        """
        if isinstance(self.unique, str):
            return f"key:{self.unique}"
        if not self.unique:
            return ""
        text = msgspec.json.encode([task_path, arguments], order="deterministic")
        return f"call:{hashlib.sha256(text).hexdigest()}"

    def group_key(self, task_path: str) -> str:
        """Return the key of the group that limits the job; "" for none."""
        if self.group:
            return f"group:{self.group}"
        return f"task:{task_path}" if self.concurrency else ""

    @property
    def group_limit(self) -> int:
        """How many jobs of the group may run at once."""
        return self.concurrency or 1

    def retry_delay(self, attempt: int, rnd: Callable[[], float] = random.random) -> float:
        """Return the seconds between the end of `attempt` and the next one."""
        if not self.backoff or not self.backoff_max:
            return 0.0
        base = min(self.backoff, self.backoff_max)
        return retry.full_jitter(attempt, base=base, cap=self.backoff_max, random=rnd)


class JobOptionsGiven(TypedDict, total=False):
    """The same fields for type checkers, where some of them are given."""

    max_attempts: int
    backoff: float
    backoff_max: float
    timeout: float | None
    unique: bool | str
    unique_for: float | None
    group: str
    concurrency: int | None
    process: bool
    retention: float | None


def job_options(**options: Unpack[JobOptionsGiven]) -> Callable[[T], T]:
    """Set options for a task: the fields of `JobOptions`.

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


def _check_key(name: str, key: object, what: str) -> None:
    if not isinstance(key, str) or not 1 <= len(key) <= KEY_MAX:
        raise InvalidArgument(
            f"{name} is {what}: a text of 1 to {KEY_MAX} characters; not {key!r}."
        )
    try:
        encode(key, limit=4 * KEY_MAX, what=name)
    except InvalidPayload as error:
        raise InvalidArgument(str(error)) from error
