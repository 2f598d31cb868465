"""Records read per second by `Stream.replay`, beside raw psycopg and the ORM.

    python -m tests.benchmarks replay --json
    python -m tests.benchmarks replay --json --database sqlite

All read the same records of one stream, in order, in pages or chunks of 1,000.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg

from .databases import django_on
from .figures import alternate, compare

RECORDS, QUICK_RECORDS = 100_000, 2_000
PAGE = 1_000
NAME = "replayed"
KEYSET = """
    SELECT id, position, type, key, {data}, {headers}, recorded_at FROM echomq_record
    WHERE stream_id = %s AND position >= %s ORDER BY position LIMIT %s
"""
OURS = "ours"


def run(*, rounds: int, quick: bool, database: str = "postgres") -> dict[str, Any]:
    """Measure. SQLite is measured alone and beside the ORM: psycopg isn't for it."""
    records = QUICK_RECORDS if quick else RECORDS
    with django_on(database, durable=not quick) as dsn:
        stream_id = fill(records)
        readers: dict[str, Callable[[], Iterator[Any]]] = {OURS: _ours}
        if dsn:
            connection = psycopg.connect(dsn, autocommit=True)
            readers["psycopg, decoded"] = keyset(connection, stream_id, text=False)
            readers["psycopg, text"] = keyset(connection, stream_id, text=True)
        readers["ORM iterator"] = lambda: _orm(stream_id)
        figures = alternate(
            {name: timed(reader, records) for name, reader in readers.items()}, rounds
        )
        if dsn:
            connection.close()
    return {
        "name": "replay",
        **compare(figures, unit="records/s", ours=OURS),
        "rounds": rounds,
        "records": records,
        "database": database,
    }


def fill(records: int) -> int:
    from django.db import connection

    from echomq_app.models import Stream as Row
    from echomq_app.stream import Stream

    from .writers import KEY, SAMPLE, TYPE

    for start in range(0, records, 10_000):
        Stream(NAME).append_many(
            [
                {"data": {**SAMPLE, "n": n}, "type": TYPE, "key": KEY}
                for n in range(start, min(start + 10_000, records))
            ]
        )
    with connection.cursor() as cursor:  # pages seen by all, statistics known to the planner
        cursor.execute("VACUUM" if connection.vendor == "sqlite" else "VACUUM ANALYZE")
    return int(Row.objects.get(name=NAME).pk)


def timed(reader: Callable[[], Iterator[Any]], records: int) -> Callable[[], float]:
    def rate() -> float:
        begun = time.perf_counter()
        read = sum(1 for _ in reader())
        elapsed = time.perf_counter() - begun
        if read != records:
            raise RuntimeError(f"{reader} read {read} records of {records}.")
        return records / elapsed

    return rate


def _ours() -> Iterator[Any]:
    from echomq_app.stream import Stream

    return Stream(NAME).replay()


def keyset(
    connection: psycopg.Connection[Any], stream_id: int, *, text: bool
) -> Callable[[], Iterator[Any]]:
    """Plain pages. `text`: JSON isn't decoded, as for a reader that only passes it on."""
    cast = "::text" if text else ""
    statement = KEYSET.format(data=f"data{cast}", headers=f"headers{cast}")

    def read() -> Iterator[Any]:
        position = 0
        rows: Sequence[Any] = [None]
        while rows:
            values = (stream_id, position, PAGE)
            rows = connection.execute(statement, values, prepare=True).fetchall()
            yield from rows
            if rows:
                position = rows[-1][1] + 1

    return read


def _orm(stream_id: int) -> Iterator[Any]:
    from echomq_app.models import Record

    records = Record.objects.filter(stream_id=stream_id).order_by("position")
    return records.iterator(chunk_size=PAGE)
