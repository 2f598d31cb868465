"""What a call costs the database, counted and not timed; and streams filled by SQL."""

from __future__ import annotations

from collections.abc import Callable

from django.db import connection

from echomq_app.stream import Stream

_STEP = 10
_BLOCKS = """SELECT sum(heap_blks_read + heap_blks_hit + coalesce(idx_blks_read, 0)
    + coalesce(idx_blks_hit, 0))::bigint FROM pg_statio_user_tables WHERE relname LIKE 'echomq%'"""
_ENTRIES = """SELECT (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes
        WHERE relname LIKE 'echomq%')::bigint
    + (SELECT sum(seq_tup_read) FROM pg_stat_user_tables
       WHERE relname LIKE 'echomq_re%' OR relname LIKE 'echomq_out%')::bigint"""


def cost_of(call: Callable[[], object]) -> int:
    """Return what a call costs: blocks of our tables on PostgreSQL, steps of SQLite's machine."""
    if connection.vendor == "postgresql":
        before = _blocks()
        call()
        return _blocks() - before
    connection.ensure_connection()
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += _STEP

    connection.connection.set_progress_handler(count, _STEP)
    try:
        call()
    finally:
        connection.connection.set_progress_handler(None, 0)
    return steps


def entries_of(call: Callable[[], object]) -> int:
    """Return how many entries of indexes, dead ones too, and rows of scans a call reads.

    On SQLite see `cost_of`.
    """
    if connection.vendor != "postgresql":
        return cost_of(call)
    before = _counted(_ENTRIES)
    call()
    return _counted(_ENTRIES) - before


def _blocks() -> int:
    return _counted(_BLOCKS)


def _counted(sql: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_stat_force_next_flush()")
        cursor.execute(sql)
        return int(cursor.fetchone()[0])


def analyze() -> None:
    """Give the planner statistics of the tables as they are.

    Not on SQLite: nobody asks for them there by default, and they would stay for other tests.
    """
    if connection.vendor == "sqlite":
        return
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def filled_by_sql(name: str, count: int, *, keys: int = 1, data: str = "1") -> Stream:
    """Return a stream of so many records: the keys `k0`, `k1`, …, idempotency keys `i0`, …"""
    stream = Stream(name)
    stream.append(0, key="k0", idempotency_key="i0")
    id, at = _id_and_time()
    if count > 1:
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO echomq_record (id, stream_id, position, type, key, data, headers,"
                " idempotency_key, recorded_at)"
                f" SELECT {id}, s.id, n, '', 'k' || (n %% %s), %s, '{{}}', 'i' || n, {at}"
                f" FROM echomq_stream s, {_numbers()} AS n WHERE s.name = %s",
                [keys, data, count - 1, name],
            )
    return stream


def streams_by_sql(prefix: str, count: int) -> None:
    """Make so many empty streams, `{prefix}00001` and so on."""
    if connection.vendor == "postgresql":
        number, at = "lpad(n::text, 6, '0')", "clock_timestamp()"
    else:
        number, at = "printf('%%06d', n)", "datetime('now')"
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO echomq_stream (name, epoch, first_position, created_at)"
            f" SELECT %s || {number}, '0123456789abcdef', 0, {at} FROM {_numbers()} AS n",
            [prefix, count],
        )


def one_record_in_each() -> None:
    """Write a record to each stream that there is."""
    id, at = _id_and_time()
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO echomq_record (id, stream_id, position, type, key, data, headers,"
            " idempotency_key, recorded_at)"
            f" SELECT {id}, id, 0, '', 'k0', '1', '{{}}', 'i0', {at} FROM echomq_stream"
        )


def _id_and_time() -> tuple[str, str]:
    if connection.vendor == "postgresql":
        return "gen_random_uuid()", "clock_timestamp()"
    return "lower(hex(randomblob(16)))", "datetime('now')"


def _numbers() -> str:
    """Return a table `n` of the numbers from 1 to a parameter."""
    if connection.vendor == "postgresql":
        return "generate_series(1, %s)"
    return (
        "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s LIMIT %s) SELECT n FROM s)"
    )
