"""What our commands understand on the command line.

Each function raises `argparse.ArgumentTypeError`, whose text says what would be right.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from argparse import ArgumentTypeError
from typing import Any

from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime

_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhdw]))+\Z")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])")
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def count(text: str) -> int:
    """Read a number from 0."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a count; write digits.")
    return int(text)


def some(text: str) -> int:
    """Read a number from 1."""
    number = count(text)
    if not number:
        raise ArgumentTypeError("0 is too few; write 1 or more.")
    return number


def duration(text: str) -> dt.timedelta:
    """Read `30s`, `1h30m`, `7d`: numbers with ms, s, m, h, d or w."""
    if not _DURATION.match(text):
        raise ArgumentTypeError(f"{text!r} is no duration; write 30s, 90m, 1h30m, 7d or 2w.")
    parts = _PART.findall(text)
    try:
        return dt.timedelta(seconds=sum(float(n) * _SECONDS[unit] for n, unit in parts))
    except OverflowError:
        raise ArgumentTypeError(f"{text!r} is too long.") from None


def moment(text: str) -> dt.datetime:
    """Read a time, `2026-11-29T18:30` or `2026-11-29`, or how long ago, `1h`.

    Without an offset it is in the project's time zone.
    """
    if _DURATION.match(text):
        try:
            return timezone.now().astimezone(dt.UTC) - duration(text)
        except OverflowError:
            raise ArgumentTypeError(f"{text!r} ago is too long ago.") from None
    try:
        day = parse_date(text)
        at = dt.datetime.combine(day, dt.time()) if day else parse_datetime(text)
    except ValueError as error:  # well formed, and no time: 2026-02-30
        raise ArgumentTypeError(f"{text!r} is no time: {error}.") from None
    if at is None:
        raise ArgumentTypeError(
            f"{text!r} is no time; write 2026-11-29T18:30, 2026-11-29, or how long ago: 1h."
        )
    return timezone.make_aware(at, timezone.get_default_timezone()) if at.tzinfo is None else at


def place(text: str) -> int | dt.datetime:
    """Read a position or a time."""
    return int(text) if text.isdecimal() else moment(text)


def cursor(text: str) -> int | str:
    """Read where to begin: a cursor, a resume token, `beginning` or `end`."""
    if text.isdecimal():
        return int(text)
    if text in ("beginning", "end") or ":" in text:
        return text
    raise ArgumentTypeError(
        f"{text!r} is no place in a stream; write a cursor, a resume token, beginning or end."
    )


def words(text: str) -> list[str]:
    """Read `placed,shipped`."""
    return [word for word in text.split(",") if word]


def json_value(text: str) -> Any:
    """Read a JSON value."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text[:60]!r} is not JSON: {error}. Quote text twice.") from None
