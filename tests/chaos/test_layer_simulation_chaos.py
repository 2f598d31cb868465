"""Thousands of lives of a simulated network; `make chaos` runs the most."""

from __future__ import annotations

import hypothesis
import pytest

from tests.echo_simulation import chaos

PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_in_order_and_once_or_told(part: int) -> None:
    # Hypothesis's profile says how long to search.
    runs = 1000 if hypothesis.settings.get_current_profile_name() == "chaos" else 2
    for seed in range(1_000_000 + part * runs, 1_000_000 + (part + 1) * runs):
        try:
            chaos(seed).check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
