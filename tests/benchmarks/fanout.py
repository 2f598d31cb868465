"""Deliveries per second to 200 real websockets that follow one stream.

    python -m tests.benchmarks fanout --json
    python -m tests.benchmarks fanout --deflate

The peer is a plain `AsyncJsonWebsocketConsumer` in a group, over channels-redis, which gets
the same records by `group_send` from another process; no more than half of what its layer's
capacity holds are on their way, or it would drop them. Both run in the same uvicorn, one
after the other, with the same clients. Counted is what arrived, from the first append (or
send) to the last arrival. Ours are stored records, appended one by one, each in its own
transaction.
"""

from __future__ import annotations

import asyncio
import os
import time
from functools import partial
from typing import Any

from redis import Redis

from tests.servers import private_asgi, private_redis
from tests.wait import wait_until_async

from .databases import django_on
from .figures import alternate, compare
from .sockets import Sockets, sockets

CLIENTS, RECORDS, PLAIN_RECORDS = 200, 2_000, 200
IN_FLIGHT = 40
DATA = {"order": 4711, "state": "paid", "total": "99.90", "note": "left at the door"}
OURS, PEER = "ours", "group_send"


def run(
    *, rounds: int, quick: bool, database: str = "postgres", deflate: bool = False
) -> dict[str, Any]:
    """Measure; `deflate`: with permessage-deflate on both sides."""
    clients = 20 if quick else CLIENTS
    options = [] if deflate else ["--ws-per-message-deflate", "false"]
    with private_redis() as redis, django_on(database, durable=not quick):
        os.environ["ECHOMQ_REDIS_URL"] = redis.url
        with (
            private_asgi("tests.benchmarks.live_site:application", options=options) as site,
            sockets(f"{site.ws_url}/ws/echomq/", clients, *deflates(deflate)) as ours,
            sockets(f"{site.ws_url}/ws/plain/", clients, *deflates(deflate)) as plain,
        ):
            contenders = {
                OURS: partial(_ours, ours, RECORDS // (20 if quick else 1)),
                PEER: partial(_plain, plain, redis.url, PLAIN_RECORDS // (10 if quick else 1)),
            }
            for contender in contenders.values():
                contender()
            figures = alternate(contenders, rounds)
    return {
        "name": "fanout",
        **compare(figures, unit="deliveries/s", ours=OURS),
        "rounds": rounds,
        "clients": clients,
        "deflate": deflate,
    }


def deflates(on: bool) -> list[str]:
    return ["--deflate"] if on else []


def _ours(clients: Sockets, records: int) -> float:
    from echomq_app.stream import Stream

    stream = Stream("fanout")
    opened = clients.ask(subscribe={"type": "subscribe", "sub": 1, "stream": "fanout"})
    clients.begin(expect=records)
    began = time.monotonic()
    for number in range(records):
        stream.append({**DATA, "n": number}, type="order")
    return _rate(clients, began, records * opened)


def _plain(clients: Sockets, url: str, records: int) -> float:
    with Redis.from_url(url) as redis:
        redis.flushdb()  # what lies there for sockets of the round before is never taken
    opened = clients.ask(subscribe=None)
    clients.begin(expect=records)
    began = time.monotonic()
    asyncio.run(_send(url, records, opened))
    return _rate(clients, began, records * opened)


async def _send(url: str, records: int, clients: int) -> None:
    from channels_redis.core import RedisChannelLayer
    from redis.asyncio import Redis as AsyncRedis

    layer = RedisChannelLayer(hosts=[{"address": url, "socket_timeout": None}])
    async with AsyncRedis.from_url(url) as redis:
        for number in range(records):
            record = {**DATA, "n": number, "position": number, "type": "record"}
            await layer.group_send("plain", {"type": "record", "record": record})
            if number % IN_FLIGHT == IN_FLIGHT - 1:
                await wait_until_async(partial(_is_drained, redis), timeout=60, poll=0.002)
    await layer.close_pools()


async def _is_drained(redis: Any) -> bool:
    """Tell whether every queue of the layer's is empty."""
    return not [key async for key in redis.scan_iter("asgispecific*")]


def _rate(clients: Sockets, began: float, expected: int) -> float:
    arrived = clients.answer()
    clients.ask(close=True)
    if arrived["count"] < expected * 0.99:
        raise RuntimeError(f"{arrived['count']} of {expected} arrived.")
    return float(arrived["count"] / (arrived["at"] - began))
