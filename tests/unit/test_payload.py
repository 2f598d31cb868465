"""What data may be: exactly the JSON that both databases give back as it was."""

from __future__ import annotations

import collections
import enum
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echomq_app.core.event import to_wire
from echomq_app.core.ids import JobId
from echomq_app.core.payload import MAX_DEPTH, decode, encode, storable
from echomq_app.core.records import NewRecord, encode_record
from echomq_app.exceptions import InvalidPayload

text = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
    max_leaves=20,
)


@given(values)
def test_what_is_taken_comes_back(value: object) -> None:
    assert decode(encode(value)) == value
    assert json.loads(encode(value)) == value


@given(st.recursive(st.floats() | st.text(st.characters()) | st.binary(), st.lists, max_leaves=5))
def test_nothing_but_a_named_error_comes_out_of_anything(value: object) -> None:
    try:
        stored = encode(value)
    except InvalidPayload:
        return
    assert decode(stored) == value
    assert b"\\u0000" not in stored.replace(b"\\\\", b"")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": "x\0"}]}, r"data\.a\[1\]\.b has a NUL"),
        ({"a": float("inf")}, r"data\.a is inf"),
        ({"a": {5: 1}}, r"data\.a has the key 5 of type int"),
        ([set()], r"data\[0\] is of type set"),
        (["\udc80"], r"data\[0\] has a lone surrogate"),
    ],
)
def test_error_names_the_path(value: object, path: str) -> None:
    with pytest.raises(InvalidPayload, match=path):
        encode(value)


def test_backslash_text_that_looks_like_a_nul_is_no_nul() -> None:
    assert decode(encode("\\u0000")) == "\\u0000"


def test_deep_and_circular() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(InvalidPayload, match="contains itself"):
        encode(loop)


def nested(depth: int, wrap: Any = lambda inner: [inner]) -> Any:
    value = wrap(None)
    for _ in range(depth - 1):
        value = wrap(value)
    return value


WRAPS = {
    "list": lambda inner: [1.5, inner],
    "tuple": lambda inner: (inner, "x"),
    "dict": lambda inner: {"a": 1.5, "b": inner},
    "subclass": lambda inner: collections.OrderedDict(a=inner),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("core", [None, [], {}, (), 1.5, 2**70])
def test_one_depth_for_all(wrap: Any, core: Any) -> None:
    depth = MAX_DEPTH - isinstance(core, list | dict | tuple)
    value = core
    for _ in range(depth):
        value = wrap(value)
    assert decode(encode(value)) is not None
    with pytest.raises(InvalidPayload, match="nested deeper than 100 levels"):
        encode(wrap(value))


def test_the_depth_counts_for_all_that_is_stored_or_sent() -> None:
    deep = nested(MAX_DEPTH + 1)
    with pytest.raises(InvalidPayload, match="headers"):
        encode_record(NewRecord(data=1, headers={"a": deep}), limit=10**6)
    with pytest.raises(InvalidPayload):
        encode_record(NewRecord(data=deep), limit=10**6)
    with pytest.raises(InvalidPayload):
        to_wire("x", JobId.from_int(0), deep, limit=10**6)


def test_members_of_text_choices_are_their_text() -> None:
    class Colour(str, enum.Enum):  # noqa: UP042  (as Django's TextChoices are)
        RED = "red"

    assert encode({"colour": Colour.RED}) == b'{"colour":"red"}'
    assert encode((1, (2,))) == b"[1,[2]]"


def test_limit_counts_bytes() -> None:
    assert encode("é", limit=4) == b'"\xc3\xa9"'
    with pytest.raises(InvalidPayload, match="4 bytes of JSON, the limit is 3"):
        encode("é", limit=3)


@given(st.text(st.characters()))
def test_storable_text_can_always_be_stored(anything: str) -> None:
    kept = storable(anything)
    kept.encode()
    assert "\0" not in kept
    encode(kept)


def test_integer_longer_than_python_writes() -> None:
    for value in (10**5_000, {"a": [10**5_000]}):
        with pytest.raises(InvalidPayload, match="Send it as text"):
            encode(value)


def test_integer_longer_than_python_reads_stops_no_reader() -> None:
    """SQL clients may write one: PostgreSQL's numbers have up to 131,072 digits."""
    assert decode("[1, " + "9" * 5_000 + "]") == [1, float("inf")]
