"""Run a benchmark: `python -m tests.benchmarks NAME --json`.

A benchmark is a module beside this one with `run(*, rounds, quick, **options)`. Options
are given as `--key value` or `--flag`. `all` runs every one with its defaults.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

DEFAULT_ROUNDS = 5


def names() -> list[str]:
    """Return the names of all benchmarks."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [
        file.stem.replace("_", "-")
        for file in files
        if re.search(r"^def run\(", file.read_text("utf-8"), re.MULTILINE)
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("name", choices=["all", *names()])
    parser.add_argument("--json", action="store_true", help="print one JSON object in one line")
    parser.add_argument("--rounds", type=int, default=0, help=f"{DEFAULT_ROUNDS}, quick: 1")
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    given, rest = parser.parse_known_args(argv)
    if given.name == "all":
        # Each in a process of its own: Django is set up once per process.
        command = [sys.executable, "-m", "tests.benchmarks"]
        codes = [subprocess.call([*command, name, *argv[1:]]) for name in names()]
        return max(codes)
    run = importlib.import_module(f"tests.benchmarks.{given.name.replace('-', '_')}").run
    try:
        options = _options(rest, run)
    except ValueError as error:
        parser.error(str(error))
    rounds = given.rounds or (1 if given.quick else DEFAULT_ROUNDS)
    result = run(rounds=rounds, quick=given.quick, **options)
    print(json.dumps(result, indent=None if given.json else 2))
    return 0


def _options(words: list[str], run: Any) -> dict[str, Any]:
    """Turn `--key value --flag` into keyword arguments of the types that `run` has."""
    known = inspect.signature(run).parameters
    options: dict[str, Any] = {}
    while words:
        word, words = words[0], words[1:]
        key = word.removeprefix("--").replace("-", "_")
        if not word.startswith("--") or key not in known or key in ("rounds", "quick"):
            raise ValueError(f"{word} is no option of this benchmark")
        if isinstance(known[key].default, bool):
            options[key] = True
        elif words:
            options[key] = type(known[key].default)(words[0])
            words = words[1:]
        else:
            raise ValueError(f"{word} needs a value")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
