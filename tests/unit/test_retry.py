"""Backoff with full jitter: bounds, growth, and the arguments that make no sense."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echomq_app.core.retry import ceiling, full_jitter


def test_the_ceiling_doubles_up_to_the_cap() -> None:
    got = [ceiling(attempt, base=0.5, cap=5.0) for attempt in range(1, 7)]

    assert got == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_the_draw_decides_where_below_the_ceiling() -> None:
    assert full_jitter(3, base=1.0, cap=60.0, random=lambda: 0.0) == 0.0
    assert full_jitter(3, base=1.0, cap=60.0, random=lambda: 0.25) == 1.0


@given(
    attempt=st.integers(1, 10**9),
    base=st.floats(1e-6, 1e3),
    factor=st.floats(1, 1e6),
    draw=st.floats(0, 1, exclude_max=True),
)
def test_never_negative_never_above_the_cap_and_always_finite(
    attempt: int, base: float, factor: float, draw: float
) -> None:
    cap = base * factor

    delay = full_jitter(attempt, base=base, cap=cap, random=lambda: draw)

    assert 0 <= delay <= cap
    assert math.isfinite(delay)


@pytest.mark.parametrize(
    ("attempt", "base", "cap"),
    [(0, 1.0, 2.0), (-1, 1.0, 2.0), (1, 0.0, 1.0), (1, -1.0, 1.0), (1, 2.0, 1.0)],
)
def test_arguments_without_a_meaning_are_refused(attempt: int, base: float, cap: float) -> None:
    with pytest.raises(ValueError, match=r"attempt|base"):
        ceiling(attempt, base=base, cap=cap)
