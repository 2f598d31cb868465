"""What data a record or a job may carry, and how a failure text is made storable.

Strict JSON: what comes back is what went in, on both databases (but for a few floats:
PostgreSQL's decimals give 1e23 back as an integer, and -0.0 as 0.0). Python's `json`
would turn the key `1` into `"1"`, write NaN (which is no JSON), and pass NUL and
lone surrogates on to PostgreSQL, which refuses the whole statement. Here each is
refused before any I/O, with the path to it.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import msgspec

from ..exceptions import InvalidPayload

MAX_DEPTH = 100
"""Arrays and objects inside each other, at most. The SQL functions hold to the same number: every
parser, at whatever depth of a stack it is called, and every page then copes with what is stored."""

_NUL = b"\\u0000"
_LARGEST_FLOAT = sys.float_info.max
_PLAIN = frozenset({str, int, bool, type(None)})


def encode(value: Any, *, limit: int | None = None, what: str = "data") -> bytes:
    """Return `value` as JSON in UTF-8; raise `InvalidPayload` for what isn't strict JSON.

    Tuples become arrays, members of Django's `TextChoices` their text. `limit` is in
    bytes; `what` names the value in the error.
    """
    try:
        if _is_plain(value):
            text = _encode(value)
        else:
            _refuse(value, what)
            text = _dump(value)
    except UnicodeEncodeError:
        _refuse(value, what)
        raise
    except InvalidPayload:
        raise
    except ValueError as error:
        raise InvalidPayload(f"{what} has an integer too long: {error}. Send it as text.") from None
    if text.find(_NUL) >= 0:  # in a quarter of the time of `in`
        _refuse(value, what)
    if limit is not None and len(text) > limit:
        raise InvalidPayload(
            f"{what} is {len(text):,} bytes of JSON, the limit is {limit:,}. Store it elsewhere "
            "and append a reference, or raise ECHOMQ['MAX_RECORD_BYTES']."
        )
    return text


def decode(text: str | bytes) -> Any:
    """Return the value of stored JSON text.

    Raises `ValueError` or `RecursionError` for a text that only SQL can have written.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        # Numbers that SQL may write and msgspec won't take, such as 1e400.
        return json.loads(text, parse_int=_integer)


def storable(text: str) -> str:
    """Return `text` with what a database can't hold replaced: recording can't fail."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()


def _encode(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except OverflowError:  # an integer beyond 64 bits
        return _dump(value)


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _integer(digits: str) -> int | float:
    """Read an integer; one too long for Python's limit is infinity, as 1e999 is."""
    try:
        return int(digits)
    except ValueError:
        return float(digits)


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Tell whether every part has exactly a JSON type. No paths: this is the fast way."""
    kind = type(value)
    if depth == MAX_DEPTH and kind is not float and kind not in _PLAIN:
        return False
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                return False
            kind = type(item)
            if kind is float:  # here, too: a call costs more than all the rest
                if not -_LARGEST_FLOAT <= item <= _LARGEST_FLOAT:
                    return False
            elif kind not in _PLAIN and not _is_plain(item, depth + 1):
                return False
        return True
    if kind is list or kind is tuple:
        for item in value:
            if type(item) not in _PLAIN and not _is_plain(item, depth + 1):
                return False
        return True
    if kind is float:
        return bool(-_LARGEST_FLOAT <= value <= _LARGEST_FLOAT)
    return kind in _PLAIN


def _refuse(value: Any, path: str, depth: int = 0) -> None:
    """Raise for the first part that can't be stored, with the path to it."""
    if depth == MAX_DEPTH and isinstance(value, dict | list | tuple):
        raise InvalidPayload(
            f"{path:.60}… is nested deeper than {MAX_DEPTH} levels, or contains itself. Flatten "
            "it, or send that part as a string of JSON."
        )
    if isinstance(value, str):
        _refuse_text(value, path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidPayload(f"{path} is {value}, which is no JSON number. Send null or text.")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidPayload(
                    f"{path} has the key {key!r} of type {type(key).__name__}; JSON keys are str."
                )
            _refuse_text(key, f"a key of {path}")
            _refuse(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse(item, f"{path}[{index}]", depth + 1)
    elif value is not None and not isinstance(value, int):
        raise InvalidPayload(
            f"{path} is of type {type(value).__name__}, which JSON doesn't have. Convert it "
            "first: dict, list, tuple, str, int, float, bool and None can be stored."
        )


def _refuse_text(text: str, path: str) -> None:
    if "\0" in text:
        raise InvalidPayload(
            f"{path} has a NUL character, which PostgreSQL can't hold: {text[:40]!r}. "
            "Strip it, or send the bytes in base64."
        )
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidPayload(
            f"{path} has a lone surrogate, which UTF-8 can't hold: {text[:40]!r}. "
            "Decode the bytes it came from with errors='replace'."
        ) from None
