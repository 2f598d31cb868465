"""What our commands print: a table for people, JSON for programs.

`jsonl` prints each line as it comes; `table` and `json` need all of them first. Values
are the same in each: times in UTC as ISO 8601, durations in seconds, ids as text.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ..core.ids import BrandedId

FORMATS = ("table", "json", "jsonl")

_WIDEST = 60


class Writer(Protocol):
    """Django's `OutputWrapper`, as far as it is used here."""

    def write(self, msg: str = ..., /) -> Any: ...
    def flush(self) -> Any: ...


def plain(value: Any) -> Any:
    """Return a value of ours, or a list or dict of some, as JSON has it."""
    if isinstance(value, msgspec.Struct):
        fields = {name: _scalar(getattr(value, name)) for name in value.__struct_fields__}
        for name in ("token", "count"):  # what our values derive
            if name not in fields and hasattr(value, name):
                fields[name] = getattr(value, name)
        return fields
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return _scalar(value)


def _scalar(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat()
    if isinstance(value, dt.timedelta):
        return value.total_seconds()
    return str(value) if isinstance(value, BrandedId) else value


def json_line(value: Any) -> str:
    """Return a value of ours as one line of JSON."""
    value = plain(value)
    try:
        return msgspec.json.encode(value).decode()
    except OverflowError:  # an integer beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class Output:
    """Prints in one format. `columns` pick and order what a table shows."""

    def __init__(self, stream: Writer, format: str) -> None:
        self._stream = stream
        self.format = format

    def one(self, value: Any) -> None:
        """Print one thing: as JSON, or a line per field."""
        if self.format != "table":
            self._stream.write(json_line(value))
            return
        fields = plain(value)
        width = max(map(len, fields))
        for name, field in fields.items():
            self._stream.write(f"{name.ljust(width)}  {_cell(field)}")

    def many(self, values: Iterable[Any], columns: Sequence[str]) -> None:
        """Print several things of a kind."""
        if self.format == "jsonl":
            for value in values:
                self.line(value)
        elif self.format == "json":
            self._stream.write(f"[{','.join(map(json_line, values))}]")
        else:
            self._table([plain(value) for value in values], columns)

    def line(self, value: Any, *, flush: bool = False) -> None:
        """Print a line of JSON; flush it where somebody may wait for it."""
        self._stream.write(json_line(value))
        if flush:
            self._stream.flush()

    def _table(self, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
        cells = [[_cell(row.get(column)) for column in columns] for row in rows]
        widths = [
            max(len(column), *(len(row[index]) for row in cells), 0)
            for index, column in enumerate(columns)
        ]
        right = [
            bool(rows) and all(isinstance(row.get(column), int | float | None) for row in rows)
            for column in columns
        ]
        for row in [list(columns), *cells]:
            line = "  ".join(
                text.rjust(width) if to_right else text.ljust(width)
                for text, width, to_right in zip(row, widths, right, strict=True)
            )
            self._stream.write(line.rstrip())


def _cell(value: Any) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, str):
        text = value if value.isprintable() else json_line(value)
    else:
        text = json_line(value)
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
