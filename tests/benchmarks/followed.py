"""Milliseconds until a replay begins while one process follows thousands of idle streams.

    python -m tests.benchmarks followed --json --streams 5000
    python -m tests.benchmarks followed --json --streams 5000 --without-redis

Beside it, in the same run, the same with one stream followed: what the others cost. Also how
long an append takes to reach a page, the statements per second that the process sends while
nothing happens, its threads and its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import statistics
import threading
import time
from typing import Any

from tests.servers import private_redis

from .databases import django_on

STREAMS, QUICK_STREAMS = 5_000, 50
REPLAYED, PAGE = "replayed", 500
IDLE_SECONDS, QUICK_SECONDS = 10.0, 0.5
TRIES, QUICK_TRIES = 20, 2


def run(
    *, rounds: int, quick: bool, streams: int = STREAMS, without_redis: bool = False
) -> dict[str, Any]:
    """Follow one stream, then all, and measure the same."""
    number = QUICK_STREAMS if quick else streams
    with contextlib.ExitStack() as stack:
        if not without_redis:
            os.environ["ECHOMQ_REDIS_URL"] = stack.enter_context(private_redis()).url
            stack.callback(os.environ.pop, "ECHOMQ_REDIS_URL")
        dsn = stack.enter_context(django_on("postgres", durable=not quick))
        _fill(number)
        results = asyncio.run(_measure(dsn, number, rounds, quick))
        from echomq_app import engine

        engine.stop()
    alone, crowd = results
    return {
        "name": "followed",
        "ours": round(crowd["replay_ms"], 2),
        "peers": {"one stream followed": round(alone["replay_ms"], 2)},
        "ratios": {"one stream followed": round(crowd["replay_ms"] / alone["replay_ms"], 2)},
        "unit": "ms to a replay's first record",
        "rounds": rounds,
        "streams": number,
        "cases": results,
    }


def _fill(number: int) -> None:
    from echomq_app.models import Stream as Row
    from echomq_app.stream import Stream

    names = [f"idle.{n}" for n in range(number)]
    Row.objects.bulk_create([Row(name=name) for name in names], batch_size=1_000)
    Stream(REPLAYED).append_many([{"data": {"n": n}} for n in range(20_000)])


async def _measure(dsn: str, number: int, rounds: int, quick: bool) -> list[dict[str, Any]]:
    from echomq_app.live.hub import hub_of_this_loop

    hub = hub_of_this_loop()
    results, readers = [], [await hub.open("idle.0", wake=bool)]
    for followed in (1, number):
        begun = time.monotonic()
        more = [hub.open(f"idle.{n}", wake=bool) for n in range(len(readers), followed)]
        readers += await asyncio.gather(*more)
        opened = time.monotonic() - begun
        await asyncio.sleep(0.2 if quick else 5.0)  # the groups are joined
        replays, appends = [], []
        for n in range((QUICK_TRIES if quick else TRIES) * rounds):
            replays.append(await _replay(hub, 2_000 + 700 * n % 15_000))
            appends.append(await _append(hub, "idle.0"))
        results.append(
            {
                "followed": followed,
                "seconds to open": round(opened, 2),
                "replay_ms": statistics.median(replays),
                "replay_ms_max": round(max(replays), 1),
                "append_to_page_ms": round(statistics.median(appends), 2),
                "append_to_page_ms_max": round(max(appends), 1),
                "statements_per_second": await _statements(dsn, quick),
                "threads": threading.active_count(),
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
            }
        )
    for reader in readers:
        reader.close()
    return results


async def _replay(hub: Any, cursor: int) -> float:
    """Open a reader at a place that is in no ring, and take its first record."""
    hub._pages._kept.clear()
    hub._pages._kept_bytes = 0
    news = asyncio.Event()
    begun = time.perf_counter()
    reader = await hub.open(REPLAYED, cursor, wake=news.set)
    await _taken(reader, news)
    elapsed = time.perf_counter() - begun
    reader.close()
    return elapsed * 1_000


async def _append(hub: Any, name: str) -> float:
    from echomq_app.stream import Stream

    news = asyncio.Event()
    reader = await hub.open(name, wake=news.set)
    begun = time.perf_counter()
    appending = asyncio.create_task(asyncio.to_thread(Stream(name).append, {"n": 0}))
    await _taken(reader, news)
    elapsed = time.perf_counter() - begun
    await appending
    reader.close()
    return elapsed * 1_000


async def _taken(reader: Any, news: asyncio.Event) -> None:
    while True:
        news.clear()
        taken = reader.take(PAGE, 1_000_000)
        if taken is not None and getattr(taken, "records", None):
            return
        await news.wait()


async def _statements(dsn: str, quick: bool) -> float:
    """Count transactions of the database, each a statement here, while nothing happens."""
    import psycopg

    def count() -> int:
        with psycopg.connect(dsn, autocommit=True) as connection:
            row = connection.execute(
                "SELECT pg_stat_force_next_flush(), xact_commit FROM pg_stat_database"
                " WHERE datname = current_database()"
            ).fetchone()
        return int(row[1]) if row else 0

    seconds = QUICK_SECONDS if quick else IDLE_SECONDS
    await asyncio.sleep(0.1 if quick else 2.0)
    before, begun = await asyncio.to_thread(count), time.monotonic()
    await asyncio.sleep(seconds)
    after = await asyncio.to_thread(count)
    # A session's own counts are flushed when it has been idle for a second.
    return round(max(0, after - before - 1) / (time.monotonic() - begun), 1)
