"""Records per second to one page that comes back 100,000 records behind.

    python -m tests.benchmarks resume --json

The page is a real websocket in another process, the server a real uvicorn. The peer reads
the same rows with psycopg alone, in pages of 1,000, their JSON as text: nothing is decoded,
encoded or sent there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg

from tests.servers import private_asgi

from . import replay
from .databases import django_on
from .figures import alternate, compare
from .sockets import Sockets, sockets

OURS, PEER = "ours", "psycopg, text"


def run(*, rounds: int, quick: bool) -> dict[str, Any]:
    """Measure, on PostgreSQL."""
    records = replay.QUICK_RECORDS if quick else replay.RECORDS
    options = ["--ws-per-message-deflate", "false"]
    with django_on("postgres", durable=not quick) as dsn:
        stream_id = replay.fill(records)
        with (
            private_asgi("tests.benchmarks.live_site:application", options=options) as site,
            sockets(f"{site.ws_url}/ws/echomq/", 1) as client,
            psycopg.connect(dsn, autocommit=True) as connection,
        ):
            keyset = replay.keyset(connection, stream_id, text=True)
            contenders: dict[str, Callable[[], float]] = {
                OURS: partial(_ours, client, records),
                PEER: replay.timed(keyset, records),
            }
            for contender in contenders.values():
                contender()
            figures = alternate(contenders, rounds)
    return {
        "name": "resume",
        **compare(figures, unit="records/s", ours=OURS),
        "rounds": rounds,
        "records": records,
    }


def _ours(client: Sockets, records: int) -> float:
    began = time.monotonic()
    client.ask(subscribe={"type": "subscribe", "sub": 1, "stream": replay.NAME, "from": "first"})
    arrived = client.ask(expect=records)
    client.ask(close=True)
    if arrived["count"] != records:
        raise RuntimeError(f"{arrived['count']} of {records} arrived.")
    return float(records / (arrived["at"] - began))
