"""Who appends: ours, raw psycopg in four ways, and the recorder of `eventsourcing`.

Each is a context manager that yields a function which writes once and returns how many
records that were. All start from the same Python values: encoding is part of the work.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import psycopg
from psycopg.conninfo import conninfo_to_dict

from echomq_app.core.ids import event_id
from echomq_app.stream import Stream

from . import enqueuers
from .crew import Load, Seat

TYPE, KEY = "quake", "uw"
SAMPLE = {
    "id": "uw61345682",
    "time": 1517363399650,
    "updated": 1517942380200,
    "mag": 0.31,
    "magType": "ml",
    "place": "37km NNE of Amboy, Washington",
    "status": "reviewed",
    "tsunami": 0,
    "net": "uw",
    "longitude": -122.197,
    "latitude": 46.2035,
    "depth_km": 3.28,
}

Writer = Callable[[Load, Seat], AbstractContextManager[Callable[[], int]]]

# Beside ours, with the same indexes; nobody numbers its positions or guards its rows.
RAW_TABLES = """
    CREATE TABLE bench_record (LIKE echomq_record INCLUDING ALL);
    CREATE TABLE bench_counter (stream_id bigint PRIMARY KEY, value bigint NOT NULL);
    INSERT INTO bench_counter SELECT n, 0 FROM generate_series(0, 99) AS n;
"""
COLUMNS = "(id, stream_id, position, type, key, data, headers, idempotency_key, recorded_at)"
INSERT = (
    f"INSERT INTO bench_record {COLUMNS}"
    " VALUES (%s, %s, %s, %s, %s, %s, '{}', '', clock_timestamp())"
)


@contextlib.contextmanager
def ours(load: Load, seat: Seat) -> Iterator[Callable[[], int]]:
    """`Stream.append`, or `append_many`, outside a transaction."""
    stream = Stream(f"{load.batch}-{'shared' if load.shared else seat.number}")
    if load.batch == 1:

        def write() -> int:
            stream.append(SAMPLE, type=TYPE, key=KEY)
            return 1
    else:

        def write() -> int:
            records = [{"data": SAMPLE, "type": TYPE, "key": KEY} for _ in range(load.batch)]
            return len(stream.append_many(records))

    yield write


@contextlib.contextmanager
def insert(load: Load, seat: Seat) -> Iterator[Callable[[], int]]:
    """One prepared INSERT in autocommit mode: no lock, no receipt, positions of its own."""
    stream_id, positions = _stream_id(load, seat), _own_positions()
    with psycopg.connect(seat.dsn, autocommit=True) as connection:

        def write() -> int:
            position = next(positions)
            data = msgspec.json.encode(SAMPLE).decode()
            row = (_id(position), stream_id, position, TYPE, KEY, data)
            connection.execute(INSERT, row, prepare=True)
            return 1

        yield write


@contextlib.contextmanager
def copy(load: Load, seat: Seat) -> Iterator[Callable[[], int]]:
    """One COPY and one commit per batch."""
    stream_id, positions = _stream_id(load, seat), _own_positions()
    with psycopg.connect(seat.dsn, autocommit=True) as connection:

        def write() -> int:
            with connection.cursor().copy(f"COPY bench_record {COLUMNS} FROM STDIN") as rows:
                now = "now"  # PostgreSQL's word for the time of the transaction
                for position in itertools.islice(positions, load.batch):
                    data = msgspec.json.encode(SAMPLE).decode()
                    id = _id(position)
                    rows.write_row((id, stream_id, position, TYPE, KEY, data, "{}", "", now))
            return load.batch

        yield write


@contextlib.contextmanager
def counter_row(load: Load, seat: Seat) -> Iterator[Callable[[], int]]:
    """Dense positions in the usual way: BEGIN, UPDATE of a counter, INSERT, COMMIT."""
    stream_id = _stream_id(load, seat)
    count = "UPDATE bench_counter SET value = value + 1 WHERE stream_id = %s RETURNING value"
    target = stream_id + 1_000  # other streams than those of `insert`
    with psycopg.connect(seat.dsn) as connection:

        def write() -> int:
            with connection.transaction(), connection.cursor() as cursor:
                cursor.execute(count, (stream_id,), prepare=True)
                (position,) = cursor.fetchone() or (0,)
                data = msgspec.json.encode(SAMPLE).decode()
                row = (_id(position), target, position, TYPE, KEY, data)
                cursor.execute(INSERT, row, prepare=True)
            return 1

        yield write


def eventsourcing(*, function: bool) -> Writer:
    """The application recorder of the `eventsourcing` package.

    As it comes, or with `function` in its faster way (a function in the database, which it
    has off by default). Its log is the whole table; an aggregate's events are numbered by
    the aggregate's one writer.
    """

    @contextlib.contextmanager
    def recorder(load: Load, seat: Seat) -> Iterator[Callable[[], int]]:
        from eventsourcing.persistence import StoredEvent

        originator, versions = uuid.uuid4(), itertools.count(1)
        with _recorder(seat.dsn, function=function) as events:

            def write() -> int:
                batch = [
                    StoredEvent(originator, next(versions), TYPE, msgspec.json.encode(SAMPLE))
                    for _ in range(load.batch)
                ]
                events.insert_events(batch)
                return load.batch

            yield write

    return recorder


@contextlib.contextmanager
def _recorder(dsn: str, *, function: bool = False) -> Iterator[Any]:
    from eventsourcing.postgres import PostgresApplicationRecorder, PostgresDatastore

    place: dict[str, Any] = conninfo_to_dict(dsn)
    datastore = PostgresDatastore(
        dbname=place["dbname"],
        host=place["host"],
        port=place["port"],
        user=place["user"],
        password="",
        enable_db_functions=function,
    )
    with datastore:
        yield PostgresApplicationRecorder(datastore)


EVENTSOURCING = "eventsourcing"
EVENTSOURCING_FUNCTION = "eventsourcing, function"

WRITERS: dict[str, Writer] = {
    "ours": ours,
    "insert": insert,
    "copy": copy,
    "counter row": counter_row,
    EVENTSOURCING: eventsourcing(function=False),
    EVENTSOURCING_FUNCTION: eventsourcing(function=True),
    "enqueue": enqueuers.task_enqueue,
    "its statement": enqueuers.statement,
    "insert job": enqueuers.insert_job,
    "enqueue without the record": enqueuers.without_record,
}


def make_tables(dsn: str) -> list[str]:
    """Make the peers' tables, and return the names of the peers that aren't installed."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(RAW_TABLES)
    if importlib.util.find_spec("eventsourcing") is None:
        return [EVENTSOURCING, EVENTSOURCING_FUNCTION]
    with _recorder(dsn) as events:
        events.create_table()
    return []


def _stream_id(load: Load, seat: Seat) -> int:
    return 0 if load.shared else seat.number + 1


def _own_positions() -> Iterator[int]:
    """Ascending positions that nobody else uses: nothing is asked, so nothing is dense."""
    return itertools.count(random.getrandbits(41))


def _id(position: int) -> uuid.UUID:
    """An id as ours are, so that its index grows in the same way."""
    return event_id(time.time_ns() // 1_000_000, position, random.getrandbits(32))
