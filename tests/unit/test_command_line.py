"""What the commands understand, and how they print: pure functions, tested as such."""

from __future__ import annotations

import datetime as dt
import io
import json
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest
from pytest_django.fixtures import Settings

from echomq_app.core.ids import event_id
from echomq_app.core.records import StreamRecord
from echomq_app.exceptions import (
    CursorExpired,
    CursorInvalid,
    DatabaseLocked,
    InvalidPayload,
    UnknownStream,
    WrongBrand,
)
from echomq_app.management import arguments
from echomq_app.management.failing import exit_code
from echomq_app.management.output import Output, json_line

STATE: dict[str, Any] = {"stream": "s", "first_position": 2, "write_cursor": 3, "epoch": "e"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", 0.5),
        ("30s", 30),
        ("90m", 5_400),
        ("1h30m", 5_400),
        ("1.5h", 5_400),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("0s", 0),
    ],
)
def test_duration(text: str, expected: float) -> None:
    assert arguments.duration(text) == dt.timedelta(seconds=expected)


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1 d", "1y", "1h30", "1d\n", "9" * 20 + "w"])
def test_no_duration(text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        arguments.duration(text)


def test_moment(settings: Settings) -> None:
    settings.TIME_ZONE = "Europe/Prague"
    day = dt.datetime(2026, 11, 29, tzinfo=dt.UTC)
    assert arguments.moment("2026-11-29T18:30Z") == day.replace(hour=18, minute=30)
    assert arguments.moment("2026-11-29 18:30") == day.replace(hour=17, minute=30)
    assert arguments.moment("2026-11-29") == day - dt.timedelta(hours=1)
    before, hour = dt.datetime.now(dt.UTC), dt.timedelta(hours=1)
    assert before - hour <= arguments.moment("1h") <= dt.datetime.now(dt.UTC) - hour
    assert arguments.place("17") == 17
    assert arguments.place("2026-11-29T00:00Z") == day


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (arguments.moment, "now"),
        (arguments.moment, "2026-13-01"),
        (arguments.moment, "2026-11-29T25:00"),
        (arguments.moment, "999999w"),
        (arguments.place, "-1"),
        (arguments.count, "-1"),
        (arguments.count, "1e3"),
        (arguments.some, "0"),
        (arguments.cursor, "somewhere"),
        (arguments.cursor, "-1"),
        (arguments.json_value, "{'a': 1}"),
    ],
)
def test_what_is_refused_says_what_would_be_right(read: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"write|is no time|is not JSON|is too long|ago"):
        read(text)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CursorExpired(requested=1, **STATE), 4),
        (CursorInvalid(reason="ahead", requested=9, **STATE), 4),
        (CursorInvalid(reason="malformed", requested="x", **STATE), 2),
        (InvalidPayload("no"), 2),
        (WrongBrand("no"), 2),
        (UnknownStream("s"), 1),
        (DatabaseLocked("no"), 1),
    ],
)
def test_exit_codes(error: Exception, expected: int) -> None:
    assert exit_code(error) == expected


def record(data: Any) -> StreamRecord:
    at = dt.datetime(2026, 11, 29, 19, 30, tzinfo=dt.timezone(dt.timedelta(hours=1)))
    return StreamRecord(
        id=event_id(0, 6, 0xABCDEF01),
        stream="orders",
        epoch="0123456789abcdef",
        position=6,
        type="",
        key="",
        data=data,
        headers={},
        recorded_at=at,
    )


def test_a_record_as_json() -> None:
    line = json.loads(json_line(record({"n": 10**30, "é": None})))
    assert line["data"] == {"n": 10**30, "é": None}
    assert line["recorded_at"] == "2026-11-29T18:30:00+00:00"
    assert line["token"] == "0123456789abcdef:7:abcdef01"
    assert line["id"].startswith("EVT")


def printed(format: str, values: list[Any], columns: tuple[str, ...]) -> list[str]:
    out = io.StringIO()

    class Lines:
        def write(self, msg: str = "") -> None:
            out.write(f"{msg}\n")

        def flush(self) -> None:
            out.flush()

    Output(Lines(), format).many(values, columns)
    return out.getvalue().splitlines()


def test_a_table_is_aligned_and_safe() -> None:
    rows = [
        {"n": 5, "text": "a\tb\x1b[0m"},
        {"n": 1_000, "text": ""},
        {"n": None, "text": "x" * 99},
    ]
    lines = printed("table", rows, ("n", "text"))
    assert lines[0] == "   n  text"
    assert lines[1] == '   5  "a\\tb\\u001b[0m"'
    assert lines[2] == "1000  -"
    assert lines[3] == "   -  " + "x" * 59 + "…"


@pytest.mark.parametrize("values", [[], [{"a": 1}], [{"a": 1}, {"a": 2}]])
def test_json_and_jsonl_say_the_same(values: list[Any]) -> None:
    (whole,) = printed("json", values, ("a",))
    assert json.loads(whole) == values
    assert [json.loads(line) for line in printed("jsonl", values, ("a",))] == values
