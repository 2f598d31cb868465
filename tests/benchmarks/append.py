"""Appends per second, beside raw psycopg and the recorder of `eventsourcing`.

    python -m tests.benchmarks append --json
    python -m tests.benchmarks append --json --held-snapshot
    python -m tests.benchmarks append --json --database sqlite

PostgreSQL and SQLite wait for the disk at each commit. See docs/benchmarks.md for what is
measured, and for figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import psycopg

from .crew import Crew, Load
from .databases import django_on
from .figures import alternate, compare

UNIT = "records/s"
# A round is several short slices of each contender, in turn: whatever else the machine
# does for some seconds hits all of them.
SLICES, SLICE_SECONDS, QUICK_SECONDS = 4, 0.5, 0.05
SNAPSHOT_SECONDS = 30.0
OURS, COUNTER = "ours", "counter row"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Some writers, and what each contender has them do; the first one is ours."""

    name: str
    writers: int = 1
    loads: Mapping[str, Load]


def _each(*contenders: str, batch: int = 1, shared: bool = True) -> dict[str, Load]:
    return {name: Load(contender=name, batch=batch, shared=shared) for name in contenders}


EVENTSOURCING = ("eventsourcing", "eventsourcing, function")
CASES = (
    Case(name="one writer", loads=_each(OURS, "insert", COUNTER, *EVENTSOURCING)),
    Case(
        name="8 writers, one stream",
        writers=8,
        loads=_each(OURS, "insert", COUNTER, *EVENTSOURCING),
    ),
    Case(
        name="8 writers, a stream each",
        writers=8,
        loads=_each(OURS, "insert", COUNTER, *EVENTSOURCING, shared=False),
    ),
    Case(name="batches of 100", loads=_each(OURS, "copy", *EVENTSOURCING, batch=100)),
    Case(name="batches of 1,000", loads=_each(OURS, "copy", *EVENTSOURCING, batch=1_000)),
)


def run(
    *,
    rounds: int,
    quick: bool,
    held_snapshot: bool = False,
    database: str = "postgres",
    only: str = "",
) -> dict[str, Any]:
    """Measure; the figures at the top are those of one writer, `cases` has all.

    `only`: cases whose name contains it.
    """
    with django_on(database, durable=not quick) as dsn:
        if database == "sqlite":
            return _alone(rounds=rounds, quick=quick, only=only)
        from .writers import make_tables

        missing = make_tables(dsn)
        if held_snapshot:
            return _held_snapshot(dsn, rounds=rounds, seconds=1.2 if quick else SNAPSHOT_SECONDS)
        cases = _measure_all(dsn, CASES, rounds=rounds, quick=quick, only=only, missing=missing)
    return _result(cases, rounds, missing=missing)


def _measure_all(
    dsn: str,
    cases: Iterable[Case],
    *,
    rounds: int,
    quick: bool,
    only: str,
    missing: Collection[str] = (),
) -> list[dict[str, Any]]:
    seconds = QUICK_SECONDS if quick else SLICE_SECONDS
    slices = 1 if quick else rounds * SLICES
    results = []
    with contextlib.ExitStack() as stack:
        crews: dict[int, Crew] = {}
        for case in cases:
            if only not in case.name:
                continue
            size = min(case.writers, 2) if quick else case.writers
            if size not in crews:
                crews[size] = stack.enter_context(Crew(size, dsn))
            contenders = {
                name: partial(crews[size].rate, load, seconds)
                for name, load in case.loads.items()
                if name not in missing
            }
            figures = alternate(contenders, slices)
            results.append({"case": case.name, **compare(figures, unit=UNIT, ours=OURS)})
    return results


def _alone(*, rounds: int, quick: bool, only: str) -> dict[str, Any]:
    """Ours, on SQLite: its one file has one writer at a time, so nobody is a peer."""
    alone = [dataclasses.replace(case, loads={OURS: case.loads[OURS]}) for case in CASES]
    cases = _measure_all("", alone, rounds=rounds, quick=quick, only=only)
    return _result(cases, rounds, database="sqlite")


def _result(cases: list[dict[str, Any]], rounds: int, **detail: Any) -> dict[str, Any]:
    if not cases:
        raise ValueError(f"No case has that in its name: {[case.name for case in CASES]}")
    top = {key: value for key, value in cases[0].items() if key != "case"}
    return {"name": "append", **top, "rounds": rounds, "cases": cases, **detail}


def _held_snapshot(dsn: str, *, rounds: int, seconds: float) -> dict[str, Any]:
    """One writer while a snapshot is held open elsewhere: the last sixth beside the first.

    Under the snapshot no dead row version may go. A counter row leaves one per append,
    and the next append has to pass them all.
    """
    rates: dict[str, list[tuple[float, float]]] = {OURS: [], COUNTER: []}

    def kept(contender: str) -> float:
        part = seconds / 6
        load = Load(contender=contender)
        with Crew(1, dsn) as crew:
            crew.rate(load, part)
            with psycopg.connect(dsn) as holder:
                holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
                holder.execute("SELECT count(*) FROM echomq_stream")
                (timed,) = crew.run(load, seconds, part)
        first, last = timed.counts[0] / part, timed.counts[-1] / part
        rates[contender].append((round(first), round(last)))
        return last / first

    figures = alternate({name: partial(kept, name) for name in rates}, rounds)
    return {
        "name": "append",
        **compare(
            figures, unit=f"rate of the last {seconds / 6:g} s / rate of the first", ours=OURS
        ),
        "rounds": rounds,
        "seconds": seconds,
        "first_and_last_rates": rates,
    }
