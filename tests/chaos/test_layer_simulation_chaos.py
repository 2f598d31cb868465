"""Thousands of lives of a simulated network; `make chaos` runs the most.

`ECHOMQ_CHAOS_SEED` is the number of another million of lives to begin in.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import hypothesis
import pytest

from tests.echo_simulation import Simulation, chaos, strangers

PARTS = 10
FIRST = 1_000_000 * int(os.environ.get("ECHOMQ_CHAOS_SEED", "1"))


@pytest.mark.parametrize(("live", "most"), [(chaos, 1000), (strangers, 200)])
@pytest.mark.parametrize("part", range(PARTS))
def test_in_order_and_once_or_told(part: int, live: Callable[[int], Simulation], most: int) -> None:
    # Hypothesis's profile says how long to search.
    runs = most if hypothesis.settings.get_current_profile_name() == "chaos" else 2
    for seed in range(FIRST + part * runs, FIRST + (part + 1) * runs):
        try:
            live(seed).check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
