"""The judge of written histories, `tests.layer_history`: what it sees, and what it lets pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.layer_history import Life, judge


def life(node: str, sent: int, heard: list[Any], joined_at: float | None = -1.0) -> Life:
    entries = [
        {"told": one} if isinstance(one, str) else {"from": one[0], "n": one[1]} for one in heard
    ]
    times = [float(number) for number in range(sent)]
    return Life(f"{node}.1", node, joined_at, times, entries, ended=True)


@pytest.mark.parametrize(
    ("heard", "faults"),
    [
        ([("a.1", 0), ("a.1", 1), ("a.1", 2)], 0),
        ([("a.1", 0), "a", ("a.1", 2)], 0),
        ([("a.1", 0), "a"], 0),
        ([("a.1", 0), ("a.1", 2)], 1),
        ([("a.1", 0), "b", ("a.1", 2)], 0),  # its own channel was full
        ([("a.1", 0), "c", ("a.1", 2)], 1),
        ([("a.1", 1), ("a.1", 2)], 1),
        ([("a.1", 0), ("a.1", 1), ("a.1", 1), ("a.1", 2)], 1),
        ([("a.1", 0), ("a.1", 1)], 1),
        ([], 1),
    ],
)
def test_the_judge_sees(heard: list[Any], faults: int) -> None:
    lives = {"a.1": life("a", 3, [("a.1", n) for n in range(3)]), "b.1": life("b", 0, heard)}
    assert len(judge(lives)) == faults


def test_the_judge_asks_nothing_of_what_was_sent_before_one_joined() -> None:
    lives = {"a.1": life("a", 3, [("a.1", n) for n in range(3)])}
    lives["b.1"] = life("b", 0, [("a.1", 2)], joined_at=1.5)
    assert judge(lives) == []
