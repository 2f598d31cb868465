"""Nanoseconds per check of a cancel token that nobody has cancelled.

    python -m tests.benchmarks check --json

A handler checks its token between any two units of work, so a check has to cost nothing
worth thinking about. Beside it `threading.Event.is_set`, which answers the same question
without a reason, and a bare attribute. Below 1 in `ratios` means: ours is quicker.
"""

from __future__ import annotations

import threading
import time
import timeit
from functools import partial
from typing import Any

from echomq_app import cancel

from .figures import alternate, compare

OURS = "cancel.check(token)"
CALLS = 200_000


def run(*, rounds: int, quick: bool) -> dict[str, Any]:
    """Time each in turn, in processor time; the best of many repeats: noise only adds."""
    token, event = cancel.new(), threading.Event()
    child = token.child().with_deadline(3600)
    calls = CALLS // (4 if quick else 1)
    statements: dict[str, tuple[str, dict[str, Any]]] = {
        OURS: ("check(token)", {"check": cancel.check, "token": token}),
        "cancel.check(child with a deadline)": (
            "check(token)",
            {"check": cancel.check, "token": child},
        ),
        "token.cancelled": ("token.cancelled", {"token": token}),
        "threading.Event.is_set()": ("event.is_set()", {"event": event}),
    }
    contenders = {
        name: partial(_nanoseconds, statement, names, calls)
        for name, (statement, names) in statements.items()
    }
    return {
        "name": "check",
        **compare(alternate(contenders, rounds), unit="ns", ours=OURS),
        "rounds": rounds,
    }


def _nanoseconds(statement: str, names: dict[str, Any], calls: int) -> float:
    timer = timeit.Timer(statement, globals=names, timer=time.process_time)
    best = min(timer.repeat(number=calls, repeat=20))
    return best / calls * 1e9
