"""Group messages per second from one process to another, over the layer and bare.

    python -m tests.benchmarks layer --json

One async sender, one receiver in another process, the same message (10 bytes of text), the
same Redis. Counted is what arrived, divided by the time from the first call until the
receiver has the last one. `ratios` compare ours (batch_interval 0.1) over each
transport with that transport alone, `ratios_without_interval` with batch_interval 0. Ours is
also acked by then, and the sender waits when its buffer is more than half full of what
isn't. The bare layers get room for every message, so they lose none.

`round_trip_ms` is the time of a message there and one back: `idle`, one after a pause, and
`load`, while messages flow. `hung_peer` is the time of one call of `group_send`, in
microseconds, with one other node and with a second one that is stopped (SIGSTOP).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from tests.layers import CORE, PUBSUB
from tests.servers import private_redis
from tests.wait import wait_until_async

from .figures import alternate
from .receiving import Receiver, receiver

ECHO = "echomq_app.layers.EchoChannelLayer"
BARE = {"core": CORE, "pubsub": PUBSUB}
COUNTS = {"core": 1000, "pubsub": 5000, "ours": 100_000, "each": 3000}
HUNG_TURNS = 5
GROUP = "bench"
Spec = dict[str, Any]


def run(*, rounds: int, quick: bool) -> dict[str, Any]:
    """Measure every contender in turn, `rounds` times."""
    if not settings.configured:
        settings.configure(ECHOMQ={})
    results: dict[str, Any] = {}
    with private_redis(tcp=True) as server, contextlib.ExitStack() as stack:
        contenders: dict[str, Callable[[], float]] = {}
        contests = {}
        for name, (spec, count) in _specs(server.url, (0.1,) if quick else (0.1, 0)).items():
            contest = stack.enter_context(_Contest(spec, count // (20 if quick else 1)))
            contests[name] = contest
            contenders[name] = contest.rate
            contest.rate()  # connections, imports
        figures = alternate(contenders, rounds)
        for name, contest in contests.items():
            results[name] = {
                "messages_per_second": round(median(figures[name])),
                "delivered": contest.delivered,
                "round_trip_ms": contest.round_trips(3 if quick else 100),
            }
        hung = {
            name: _hung_peer(backend, server.url, 5000)
            for name, backend in BARE.items()
            if not quick
        }
    rates = {name: result["messages_per_second"] for name, result in results.items()}
    peers = {f"bare {transport}": rates[f"bare {transport}"] for transport in BARE}
    return {
        "name": "layer",
        "unit": "messages/s",
        "ours": rates["0.1 s over pubsub"],
        "peers": peers,
        "ratios": {f"bare {transport}": _ratio(rates, "0.1 s", transport) for transport in BARE},
        "ratios_without_interval": {
            f"bare {transport}": _ratio(rates, "0 s", transport) for transport in BARE if not quick
        },
        "results": results,
        "hung_peer": hung,
        "rounds": rounds,
    }


def _ratio(rates: dict[str, int], ours: str, transport: str) -> float:
    return round(rates[f"{ours} over {transport}"] / rates[f"bare {transport}"], 2)


def _specs(url: str, intervals: tuple[float, ...]) -> dict[str, tuple[Spec, int]]:
    specs: dict[str, tuple[Spec, int]] = {}
    for transport, backend in BARE.items():
        hosts = [{"address": url, "socket_timeout": None}]
        bare: Spec = {"hosts": hosts, "prefix": f"bare{transport}"}
        if backend == CORE:
            bare["capacity"] = 1_000_000
        specs[f"bare {transport}"] = ({"BACKEND": backend, "CONFIG": bare}, COUNTS[transport])
        for interval in intervals:
            config = {"hosts": hosts, "prefix": f"echo{interval}"}
            ours = {
                "transport": {"BACKEND": backend, "CONFIG": config},
                "batch_interval": interval,
                "heartbeat_interval": 1.0,
                "capacity": COUNTS["ours"],  # it is the way that is measured, not the reader
            }
            specs[f"{interval:g} s over {transport}"] = (
                {"BACKEND": ECHO, "CONFIG": ours},
                COUNTS["ours"],
            )
    return specs


class _Contest:
    """One layer: a sender here, and the receiver's process."""

    def __init__(self, spec: Spec, count: int) -> None:
        self.spec = spec
        self.count = max(count, 100)
        self.delivered = 1.0
        self._stack = contextlib.ExitStack()
        self._runner = asyncio.Runner()

    def __enter__(self) -> _Contest:
        self._ear: Receiver = self._stack.enter_context(receiver(self.spec, GROUP))
        self._layer: Any = import_string(self.spec["BACKEND"])(**self.spec["CONFIG"])
        self._runner.run(self._join())
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        if self.spec["BACKEND"] == ECHO:
            from echomq_app.layers.stations import leave_all

            leave_all(0.1)
        self._runner.close()

    def rate(self) -> float:
        """Return messages per second that arrived."""
        self._ear.expect(self.count)
        began = time.monotonic()
        self._runner.run(self._send(self.count))
        arrived, at = self._ear.result()
        self.delivered = min(self.delivered, arrived / self.count)
        return arrived / (at - began)

    def round_trips(self, count: int) -> dict[str, float]:
        """Return medians and 99th percentiles in milliseconds, idle and under load."""
        idle = self._runner.run(self._ping(count, pause=0.12))
        load = self._runner.run(self._ping(count, pause=0.12, load=True))
        result = {}
        for name, times in (("idle", idle), ("load", load)):
            result[f"{name}_p50"] = round(median(times) * 1000, 2)
            result[f"{name}_p99"] = round(quantiles(times, n=100)[98] * 1000, 2)
        return result

    async def _join(self) -> None:
        self._channel = await self._layer.new_channel()
        await self._layer.group_add("pong", self._channel)

    async def _send(self, count: int) -> None:
        lag = self._lag()
        for number in range(count):
            await self._layer.group_send(GROUP, {"type": "x", "n": number, "text": "0123456789"})
            if number % 50 == 0:
                await wait_until_async(lambda: lag() <= 5000, 60, poll=0.001)
                await asyncio.sleep(0)

    def _lag(self) -> Callable[[], int]:
        if self.spec["BACKEND"] != ECHO:
            return lambda: 0
        node = self._layer._station.node

        def lag() -> int:
            return max(
                (one.lag(boot) for one in node.producers for boot in list(one.links)), default=0
            )

        return lag

    async def _ping(self, count: int, *, pause: float, load: bool = False) -> list[float]:
        sending = asyncio.create_task(self._load()) if load else None
        times = []
        for number in range(count):
            await asyncio.sleep(pause)
            began = time.monotonic()
            await self._layer.group_send(GROUP, {"type": "x", "ping": number})
            while (await self._layer.receive(self._channel))["pong"] != number:
                pass
            times.append(time.monotonic() - began)
        if sending is not None:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        return times

    async def _load(self) -> None:
        """Send a few hundred messages a second, for ever."""
        while True:
            for number in range(10):
                await self._layer.group_send(GROUP, {"type": "x", "m": number})
            await asyncio.sleep(0.03)


def _hung_peer(backend: str, url: str, calls: int) -> dict[str, float]:
    """Return p50 and p99 of one `group_send` in microseconds, without and with a hung node."""
    from echomq_app.layers import drain

    transport = {"BACKEND": backend, "CONFIG": {"hosts": [url], "prefix": "hung"}}
    config = {"transport": transport, "heartbeat_interval": 1.0, "batch_interval": 0}
    spec = {"BACKEND": ECHO, "CONFIG": config}
    figures: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        contest = stack.enter_context(_Contest(spec, calls))
        second = stack.enter_context(receiver(spec, GROUP))
        contest.rate()
        times: dict[str, list[float]] = {"well": [], "hung": []}
        for _ in range(HUNG_TURNS):  # in turn: what disturbs the machine then hits both
            drain(60)
            times["well"] += contest._runner.run(_time_calls(contest, calls // HUNG_TURNS))
            os.kill(second.pid, signal.SIGSTOP)
            times["hung"] += contest._runner.run(_time_calls(contest, calls // HUNG_TURNS))
            os.kill(second.pid, signal.SIGCONT)
        for name, values in times.items():
            figures[f"{name}_p50_us"] = round(median(values) * 1e6, 1)
            figures[f"{name}_p99_us"] = round(quantiles(values, n=100)[98] * 1e6, 1)
    figures["p99_ratio"] = round(figures["hung_p99_us"] / figures["well_p99_us"], 2)
    return figures


async def _time_calls(contest: _Contest, calls: int) -> list[float]:
    send = partial(contest._layer.group_send, GROUP, {"type": "x", "m": 1})
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        await send()
        times.append(time.perf_counter() - began)
        await asyncio.sleep(0.0005)
    return times
