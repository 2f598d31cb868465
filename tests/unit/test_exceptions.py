"""Errors travel: parallel test runners and process pools pickle them."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest

from echomq_app import exceptions
from echomq_app.exceptions import EchoMQError

PLACE: dict[str, Any] = {"first_position": 5, "write_cursor": 9, "epoch": "0123456789abcdef"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "CursorError": {"message": "no", "stream": "orders", **PLACE},
    "CursorExpired": {"stream": "orders", "requested": 3, **PLACE},
    "CursorInvalid": {"stream": "orders", "reason": "ahead", "requested": 10, **PLACE},
    "WrongExpectedCursor": {"stream": "orders", "expected": 1, "write_cursor": 2},
    "UnknownStream": {"stream": "orders"},
    "UndecodableRecord": {"stream": "orders", "position": 3, "why": "RecursionError"},
}
KINDS = [
    kind
    for _, kind in inspect.getmembers(exceptions, inspect.isclass)
    if issubclass(kind, EchoMQError)
]


def example(kind: type[EchoMQError]) -> EchoMQError:
    arguments = ARGUMENTS.get(kind.__name__)
    return kind("why") if arguments is None else kind(**arguments)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_pickled_and_copied_they_say_the_same(kind: type[EchoMQError]) -> None:
    error = example(kind)
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301
        assert type(twin) is kind
        assert (str(twin), twin.args, vars(twin)) == (str(error), error.args, vars(error))


@pytest.mark.parametrize("reason", ["malformed", "ahead", "epoch", "diverged"])
def test_each_reason_says_what_to_do(reason: str) -> None:
    error = exceptions.CursorInvalid(stream="orders", reason=reason, requested="x", **PLACE)
    assert f"({reason})" in str(error) and "orders" in str(error)
    assert not str(error).endswith(("..", "?."))
