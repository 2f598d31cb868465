"""Many lives of a simulated network, each by a seed, and the checker of the guarantee."""

from __future__ import annotations

import pytest

from tests.echo_simulation import Simulation, chaos, strangers

RUNS = 100


@pytest.mark.parametrize("part", range(4))
def test_in_order_and_once_or_told(part: int) -> None:
    for seed in range(part * RUNS // 4, (part + 1) * RUNS // 4):
        try:
            chaos(seed).check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_guests_that_come_and_go_unseen_by_some() -> None:
    for seed in range(30):
        try:
            strangers(seed).check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def lively() -> Simulation:
    sim = Simulation(1)
    sim.start("a")
    sim.start("b")
    sim.run(1)
    sim.write("a", 3)
    sim.run(1)
    sim.check()
    return sim


@pytest.mark.parametrize(
    "heard",
    [
        [("a#0", 0, 0), ("a#0", 0, 2)],  # a hole
        [("a#0", 0, 0), ("a#0", 0, 0)],  # twice
        [("a#0", 0, 1), ("a#0", 0, 0)],  # out of order
        [("a#0", 0, 1), ("a#0", 0, 2)],  # the first is missing
        [("a#0", 0, 0), ("a#0", 0, 2), "a"],  # told too late
        [("a#0", 0, 0), "c", ("a#0", 0, 2)],  # told of somebody else
    ],
)
def test_the_checker_sees(heard: list[tuple[str, int, int] | str]) -> None:
    sim = lively()
    sim.machines["b"].subscribers[0].heard[:] = heard
    with pytest.raises(AssertionError):
        sim.check()


@pytest.mark.parametrize("named", ["a", "b"])  # its own name stands for anybody
def test_the_checker_lets_pass_what_was_told(named: str) -> None:
    sim = lively()
    sim.machines["b"].subscribers[0].heard[:] = [("a#0", 0, 0), named, ("a#0", 0, 2)]
    sim.check()
