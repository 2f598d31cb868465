"""Events per second from one sync caller to a receiver in another process.

    python -m tests.benchmarks publish --json
    python -m tests.benchmarks publish --layer core

The peer is what the Channels documentation tells sync code to do, for the same event over
the same layer: `async_to_sync(layer.group_send)`. Counted is what arrived: events at the
receiver, divided by the time from the first call to the arrival of the last event. What
the layer dropped isn't counted, and `delivered` says which part arrived.

`ours` may carry several events in one message, if they wait together for the broker, as
in this burst; `one message each` sends every event by itself through the engine. The
figures at the top are those of the layer on which we are less ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync
from django.conf import settings

from tests.layers import CORE, PUBSUB
from tests.servers import private_redis

from .figures import alternate, compare
from .receiving import Receiver, receiver

BACKENDS = {"core": CORE, "pubsub": PUBSUB}
OURS, EACH, PEER = "ours", "one message each", "async_to_sync(group_send)"
QUEUE = "bench"
EVENTS = {OURS: 5000, EACH: 1000, PEER: 200}
DATA = {"fraction": 0.5, "note": "1,000 of 2,000 mails sent"}


def run(*, rounds: int, quick: bool, layer: str = "both") -> dict[str, Any]:
    """Publish bursts in turn, each layer by itself."""
    chosen = list(BACKENDS) if layer == "both" else [layer]
    settings.configure()
    with private_redis(tcp=True) as server:
        results = {name: _measure(BACKENDS[name], server.url, rounds, quick) for name in chosen}
    worst = min(results, key=lambda name: results[name]["ratios"][PEER])
    return {"name": "publish", **results[worst], "layers": results, "rounds": rounds}


def _measure(backend: str, url: str, rounds: int, quick: bool) -> dict[str, Any]:
    from echomq_app.core.names import events_group
    from tests.layers import channel_layers, use_layers

    config = {"hosts": [{"address": url, "socket_timeout": None}]}
    shares: dict[str, list[float]] = {name: [] for name in EVENTS}
    with (
        use_layers(channel_layers(backend, url), PUBLISH_BACKLOG=100_000),
        receiver({"BACKEND": backend, "CONFIG": config}, events_group(QUEUE)) as heard,
    ):
        contenders = {
            name: partial(_rate, call, EVENTS[name] // (10 if quick else 1), heard, shares[name])
            for name, call in _calls().items()
        }
        for contender in contenders.values():
            contender()  # connections, imports
        for seen in shares.values():
            seen.clear()
        figures = alternate(contenders, rounds)
    result = compare(figures, unit="events/s", ours=OURS)
    result["delivered"] = {name: round(min(seen), 4) for name, seen in shares.items()}
    return result


def _calls() -> dict[str, Callable[[], object]]:
    from channels.layers import get_channel_layer

    from echomq_app import engine, events
    from echomq_app.core.event import to_wire
    from echomq_app.core.ids import new_job_id
    from echomq_app.core.names import events_group

    job, group = new_job_id(), events_group(QUEUE)
    layer: Any = get_channel_layer()
    send = async_to_sync(layer.group_send)

    def message() -> dict[str, Any]:
        wire = to_wire("progress", job, DATA, limit=10_000)
        return {"type": "echomq.events", "queue": QUEUE, "events": [wire]}

    return {
        OURS: lambda: events.publish(QUEUE, "progress", job, DATA),
        EACH: lambda: engine.send(group, message()),
        PEER: lambda: send(group, message()),
    }


def _rate(call: Callable[[], object], count: int, heard: Receiver, shares: list[float]) -> float:
    heard.expect(count)
    began = time.monotonic()
    for _ in range(count):
        call()
    arrived, at = heard.result()
    shares.append(arrived / count)
    return arrived / (at - began)
