"""The app's settings: one typed object made of `settings.ECHOMQ`.

Nothing else in the app reads `django.conf.settings`, so this is the list of all
there is to set. Durations are in seconds, sizes in bytes.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import difflib
from collections.abc import Callable
from functools import cache
from typing import Any

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

RULES = {
    "AUTHORIZE": "(user, action, target) -> bool",
    "MASK": "(user, stream) -> Mask | None",
}
"""Settings that are code of the project's."""

MISSED = ("skip", "once", "all")
_SCHEDULE_KEYS: dict[str, type | tuple[type, ...]] = {
    "task": str,
    "cron": str,
    "args": (list, tuple),
    "kwargs": dict,
    "queue": str,
    "priority": int,
    "timezone": str,
    "missed": str,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EchoMQSettings:
    """Values of `settings.ECHOMQ`, with their defaults."""

    POLL_INTERVAL: float = 0.25
    """How often a tail that got no wake-up looks for new records."""

    MAX_RECORD_BYTES: int = 1_048_576
    """Largest `data` plus `headers` of one record, as JSON text in UTF-8."""

    LOCK_TIMEOUT: float = 5.0
    """How long a commit may wait for a stream's lock to append on commit."""

    RETENTION: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """What streams without a policy of their own retain, by name or pattern; the first match
    counts: `{"orders": {"max_records": 1_000_000}, "emq.*": {"max_age": 604800}}`."""

    FILTER_WINDOW: int = 10_000
    """How many positions a page filtered by type scans at most."""

    CHANNEL_LAYER: str = "default"
    """Alias in CHANNEL_LAYERS that carries the feed and the wake-ups."""

    RESUBSCRIBE_INTERVAL: float = 30.0
    """How often a listener joins its groups again."""

    NOTIFY_INTERVAL: float = 0.005
    """At most one wake-up per stream goes out in this time."""

    BROKER_TIMEOUT: float = 5.0
    """How long one send to the channel layer may take before it is given up."""

    PUBLISH_BACKLOG: int = 10_000
    """Messages that may wait for the broker in this process; later ones are lost."""

    FLUSH_DEADLINE: float = 2.0
    """How long a command waits for pending messages before it returns."""

    AUTHORIZE: str | Callable[..., Any] | None = None
    """Who may read what from a page: a callable `(user, action, target) -> bool`, sync or async,
    or the dotted path of one. `None`: Django's permissions."""

    MASK: str | Callable[..., Any] | None = None
    """What users see of a stream's records: a callable `(user, stream) -> Mask | None`, sync or
    async, or the dotted path of one."""

    AUTHORIZE_INTERVAL: float = 60.0
    """How often a page that stays connected is asked about again, at least."""

    TOKEN_MAX_AGE: float = 300.0
    """How long a token for a page without a session cookie is good."""

    SCHEDULE: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Recurring jobs, by name: `{"nightly": {"task": "shop.tasks.report", "cron": "0 2 * * *"}}`;
    also `args`, `kwargs`, `queue`, `priority`, `timezone`, `missed`."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if field.type in ("float", "int") and not (number and value > 0):
                raise ImproperlyConfigured(
                    f"ECHOMQ[{field.name!r}] has to be a positive number, not {value!r}."
                )
        _check_retention(self.RETENTION)
        _check_schedule(self.SCHEDULE)
        for name, form in RULES.items():
            rule = getattr(self, name)
            if not (rule is None or isinstance(rule, str) or callable(rule)):
                raise ImproperlyConfigured(
                    f"ECHOMQ[{name!r}] has to be a callable {form}, or the dotted path of one, "
                    f"not {rule!r}."
                )


@cache
def current() -> EchoMQSettings:
    """Return the settings in force; raise `ImproperlyConfigured` for a wrong one."""
    given = getattr(django_settings, "ECHOMQ", {})
    if not isinstance(given, dict):
        raise ImproperlyConfigured(f"ECHOMQ has to be a dict, not {type(given).__name__}.")
    known = [field.name for field in dataclasses.fields(EchoMQSettings)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" Known: {', '.join(known)}."
            raise ImproperlyConfigured(f"ECHOMQ has no setting {name!r}.{hint}")
    return EchoMQSettings(**given)


def project_setting(name: str, default: Any = None) -> Any:
    """Return a setting of the project, of Django or of another app."""
    return getattr(django_settings, name, default)


def _check_retention(rules: Any) -> None:
    where = 'ECHOMQ["RETENTION"]'
    example = '{"orders": {"max_records": 1_000_000}, "emq.*": {"max_age": 604800}}'
    if not isinstance(rules, dict):
        raise ImproperlyConfigured(f"{where} has to be a dict such as {example}, not {rules!r}.")
    for pattern, rule in rules.items():
        if not isinstance(pattern, str) or not isinstance(rule, dict):
            raise ImproperlyConfigured(
                f"{where} maps names or patterns to limits, as in {example}; "
                f"it has {pattern!r}: {rule!r}."
            )
        for limit, value in rule.items():
            if limit not in ("max_records", "max_age"):
                raise ImproperlyConfigured(
                    f"{where}[{pattern!r}] has {limit!r}; there are max_records and max_age."
                )
            kinds = int if limit == "max_records" else (int, float, dt.timedelta)
            number = value.total_seconds() if isinstance(value, dt.timedelta) else value
            if isinstance(value, bool) or not isinstance(value, kinds) or not number > 0:
                what = "a count" if limit == "max_records" else "seconds or a timedelta"
                raise ImproperlyConfigured(
                    f"{where}[{pattern!r}][{limit!r}] has to be {what} above 0, not {value!r}."
                )


def _check_schedule(schedules: Any) -> None:
    where = 'ECHOMQ["SCHEDULE"]'
    example = '{"nightly": {"task": "shop.tasks.report", "cron": "0 2 * * *"}}'
    if not isinstance(schedules, dict):
        raise ImproperlyConfigured(
            f"{where} has to be a dict such as {example}, not {schedules!r}."
        )
    for name, given in schedules.items():
        if not (isinstance(name, str) and 1 <= len(name) <= 100 and isinstance(given, dict)):
            raise ImproperlyConfigured(
                f"{where} maps names of up to 100 characters to schedules, as in {example}; "
                f"it has {name!r}: {given!r}."
            )
        for key, value in given.items():
            kind = _SCHEDULE_KEYS.get(key)
            if kind is None:
                known = ", ".join(_SCHEDULE_KEYS)
                raise ImproperlyConfigured(f"{where}[{name!r}] has {key!r}. There are: {known}.")
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ImproperlyConfigured(f"{where}[{name!r}][{key!r}] can't be {value!r}.")
        for key in ("task", "cron"):
            if key not in given:
                raise ImproperlyConfigured(f"{where}[{name!r}] has no {key!r}, as in {example}.")
        if given.get("missed", "once") not in MISSED:
            raise ImproperlyConfigured(
                f"{where}[{name!r}]['missed'] is one of {', '.join(MISSED)}, "
                f"not {given['missed']!r}."
            )
        for key, most in (("task", 500), ("cron", 200), ("timezone", 64)):
            if len(given.get(key, "")) > most:
                raise ImproperlyConfigured(
                    f"{where}[{name!r}][{key!r}] has more than {most} characters."
                )


def _reset(*, setting: str, **kwargs: Any) -> None:
    if setting == "ECHOMQ":
        current.cache_clear()


setting_changed.connect(_reset, dispatch_uid="echomq.conf")
