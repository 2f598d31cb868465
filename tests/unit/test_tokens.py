"""The decision on a reader's cursor: every combination has one explicit answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echomq_app.core.tokens import Place, ResumeToken, parse, verify
from echomq_app.exceptions import CursorExpired, CursorInvalid

EPOCH, OTHER = "0123456789abcdef", "fedcba9876543210"


def place(first: int = 2, write: int = 5, tail: str = "aaaaaaaa") -> Place:
    return Place(
        stream="s", epoch=EPOCH, first_position=first, write_cursor=write, tail_before=tail
    )


@given(st.integers(0, 10**12), st.sampled_from(["", "0a0b0c0d"]))
def test_token_comes_back(cursor: int, tail: str) -> None:
    token = ResumeToken(EPOCH, cursor, tail)
    assert parse(str(token)) == token


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        f"{EPOCH}:1",
        f"{EPOCH}:-1:",
        f"{EPOCH}:01:",
        f"{EPOCH}:1:aaaaaaaa\n",
        "0:0:",
        f"{EPOCH}:1:AAAAAAAA",
    ],
)
def test_what_is_no_token(text: str) -> None:
    assert parse(text) is None
    error = verify(place(), text)
    assert isinstance(error, CursorInvalid) and error.reason == "malformed"


@pytest.mark.parametrize("wrong", [-1, True, 1.5, b"x", object()])
def test_what_is_no_cursor(wrong: object) -> None:
    error = verify(place(), wrong)  # type: ignore[arg-type]
    assert isinstance(error, CursorInvalid) and error.reason == "malformed"


@pytest.mark.parametrize(
    ("requested", "answer"),
    [
        (None, None),
        (2, None),
        (5, None),
        (1, "expired"),
        (6, "ahead"),
        (f"{EPOCH}:3:aaaaaaaa", None),
        (f"{EPOCH}:3:", None),
        (f"{EPOCH}:3:bbbbbbbb", "diverged"),
        (f"{EPOCH}:6:aaaaaaaa", "ahead"),
        (f"{EPOCH}:1:aaaaaaaa", "expired"),
        (f"{OTHER}:3:aaaaaaaa", "epoch"),
        (f"{OTHER}:0:", "epoch"),
        (f"{OTHER}:99:aaaaaaaa", "epoch"),
    ],
)
def test_every_answer(requested: int | str | None, answer: str | None) -> None:
    error = verify(place(), requested)
    match error:
        case None:
            assert answer is None
        case CursorExpired():
            assert answer == "expired" and error.missed == 1
        case _:
            assert answer == error.reason
    if error is not None:
        assert (error.first_position, error.write_cursor, error.epoch) == (2, 5, EPOCH)


def test_record_before_the_cursor_is_gone_so_there_is_nothing_to_compare() -> None:
    assert verify(place(tail=""), f"{EPOCH}:2:bbbbbbbb") is None


def test_replica_that_is_behind_is_no_error() -> None:
    assert verify(place(), 6, may_be_ahead=True) is None
    assert verify(place(), f"{EPOCH}:6:aaaaaaaa", may_be_ahead=True) is None
