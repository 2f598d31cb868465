"""Arguments and results of a job as JSON text.

What isn't JSON is made plain, as Django does, or refused.

Before any I/O, and within `ECHOMQ["MAX_RECORD_BYTES"]` for each call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from ..conf import current
from ..core.payload import encode
from ..exceptions import InvalidArgument, InvalidPayload, InvalidResult
from .tasks_api import normalize_json

BATCH = 500
"""Calls that are written together, at most."""
BATCH_BYTES = 4 << 20
"""And as long as their text is shorter than this, or one call."""

Call: TypeAlias = tuple[Any, Any]
"""Arguments and keyword arguments."""

_WHAT = "the job's arguments"


class Batch(NamedTuple):
    """Calls that are written together."""

    calls: int
    text: bytes
    """JSON array of `{"args": [...], "kwargs": {...}}`."""


def encoded(args: Any, kwargs: Any) -> bytes:
    """Return `{"args": [...], "kwargs": {...}}`. Raises `InvalidPayload`."""
    return _encoded({"args": args, "kwargs": kwargs}, _WHAT)


def as_result(value: Any) -> str:
    """Return what a handler returned as JSON text, by the rules of arguments.

    Raises `InvalidResult`, whatever the value itself raises when it is read.
    """
    try:
        return _encoded(value, "the result").decode()
    except Exception as error:
        said = str(error) if isinstance(error, InvalidPayload) else repr(error)
        raise InvalidResult(
            f"The handler returned, but its result can't be stored: {said} The job isn't run again."
        ) from error


def _encoded(value: Any, what: str) -> bytes:
    limit = current().MAX_RECORD_BYTES
    try:
        return encode(value, limit=limit, what=what)
    except InvalidPayload as refused:
        try:
            plain = normalize_json(value)
        except (TypeError, ValueError, RecursionError):
            raise refused from None
        return encode(plain, limit=limit, what=what)


def checked(calls: Iterable[Any]) -> list[Call]:
    """Return the calls, each a pair of arguments and keyword arguments, or `InvalidArgument`.

    As a list, before anything is written: they may come from a query on the same connection,
    which could not be read between the statements of a pipeline.
    """
    found = list(calls)
    for call in found:
        try:
            args, kwargs = call
        except (TypeError, ValueError):
            args = kwargs = None
        if not (isinstance(args, tuple | list) and isinstance(kwargs, dict)):
            raise InvalidArgument(
                "A call is a pair of arguments and keyword arguments, as call(1, b=2) from "
                f"echomq_app.jobs.bulk gives it, not {str(call)[:100]}."
            )
    return found


def encoded_many(calls: Iterable[Call]) -> Iterator[Batch]:
    """Yield the calls in batches. Raises what `encoded` raises for the first that it refuses."""
    left = iter(calls)
    while batch := list(islice(left, BATCH)):
        values = [{"args": args, "kwargs": kwargs} for args, kwargs in batch]
        # Of a batch that is short, no call is too long.
        limit = min(current().MAX_RECORD_BYTES, BATCH_BYTES)
        try:
            text = encode(values, limit=limit)
        except InvalidPayload:
            yield from _one_by_one(batch)
        else:
            yield Batch(len(batch), text)


def _one_by_one(calls: list[Call]) -> Iterator[Batch]:
    texts: list[bytes] = []
    size = 0
    for args, kwargs in calls:
        text = encoded(args, kwargs)
        if texts and size + len(text) > BATCH_BYTES:
            yield _joined(texts)
            texts, size = [], 0
        texts.append(text)
        size += len(text)
    yield _joined(texts)


def _joined(texts: list[bytes]) -> Batch:
    return Batch(len(texts), b"[" + b",".join(texts) + b"]")
