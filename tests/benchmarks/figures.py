"""From measurements to the object that a benchmark prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any


def alternate(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each contender once per round, each round beginning with the next one.

    What disturbs the machine for a while then hits all of them.
    """
    names = list(contenders)
    figures: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            figures[name].append(contenders[name]())
    return figures


def compare(figures: Mapping[str, Sequence[float]], *, unit: str, ours: str) -> dict[str, Any]:
    """Return medians, and the ratio of ours to each peer: above 1, ours is the higher figure."""
    middle = {name: median(values) for name, values in figures.items()}
    peers = {name: value for name, value in middle.items() if name != ours}
    return {
        "ours": _short(middle[ours]),
        "peers": {name: _short(value) for name, value in peers.items()},
        "ratios": {name: _short(middle[ours] / value) for name, value in peers.items() if value},
        "unit": unit,
    }


def _short(value: float) -> float:
    return round(value) if value >= 100 else float(f"{value:.3g}")
