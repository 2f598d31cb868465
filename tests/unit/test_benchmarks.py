"""Every benchmark runs, and prints one JSON object of the form that all have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import names
from tests.benchmarks.figures import alternate, compare

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = [
    *([name] for name in names()),
    ["append", "--held-snapshot"],
    ["append", "--database", "sqlite", "--only", "one writer"],
    ["replay", "--database", "sqlite"],
]


@pytest.mark.parametrize("words", VARIANTS, ids=" ".join)
def test_runs_and_prints_one_object(words: list[str]) -> None:
    # In a process of its own, with a server of its own: it sets Django up for itself.
    env = {name: value for name, value in os.environ.items() if not name.startswith("ECHOMQ_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", *words, "--quick", "--json"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=env,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["name"] == words[0]
    assert isinstance(result["unit"], str)
    assert result["rounds"] == 1
    assert result["ours"] > 0
    assert all(figure > 0 for figure in result["peers"].values())
    assert set(result["ratios"]) == set(result["peers"])


@pytest.mark.parametrize(
    "words", [["append", "--colour", "red"], ["append", "--only"], ["nothing"]], ids=" ".join
)
def test_refuses_what_it_does_not_know(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks", *words],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_rounds_alternate_and_begin_with_another_contender_each() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return 1.0

    figures = alternate({name: partial(measure, name) for name in "abc"}, 2)
    assert "".join(order) == "abcbca"
    assert figures == {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [1.0, 1.0]}


def test_compares_medians() -> None:
    figures = {"ours": [100.0, 900.0, 200.0], "slow": [50.0, 60.0, 40.0], "fast": [400.0]}
    assert compare(figures, unit="records/s", ours="ours") == {
        "ours": 200,
        "peers": {"slow": 50.0, "fast": 400},
        "ratios": {"slow": 4.0, "fast": 0.5},
        "unit": "records/s",
    }
