"""A line that nobody speaks on for a long time, and then somebody does.

Two sorts of timeout could end it: the layer's own, all of which are options, and those of
the Redis client, which are fixed: redis-py 8 gives up after 5 s of silence unless told
otherwise, as long as channels-redis core's blocking read lasts.

The layer knows no other times than its options, so 6 s are to it what a minute is, if the
options are short: 20 heartbeats and 20 call timeouts (a minute of the defaults: 12 of each), and
twice `forget_after` (a minute: once). To the Redis client 6 s are past its only limit, where
the heartbeats leave it that much silence. `make chaos` waits for the minute itself.
"""

from __future__ import annotations

import asyncio

import hypothesis
import pytest

from echomq_app.layers import EchoChannelLayer
from tests.integration.layers import clean_layers, meet, subscriber, take, write
from tests.layer_transport import transport
from tests.layers import CORE, PUBSUB

LONG = hypothesis.settings.get_current_profile_name() == "chaos"
SECONDS = 60.0 if LONG else 6.0
SHORT = {
    "batch_interval": 0.05,
    "call_timeout": SECONDS / 20,
    "retry_interval": 0.05,
    "heartbeat_interval": SECONDS / 20,
    "forget_after": SECONDS / 2,
}
SILENT = {"heartbeat_interval": 2 * SECONDS, "forget_after": 10 * SECONDS}
CASES: list[dict[str, float]] = [{}, SILENT] if LONG else [SHORT, SILENT]


async def test_a_line_that_is_idle_for_a_minute(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make(kind: str, case: int, node: str) -> EchoChannelLayer:
        config = {"hosts": [redis_url], "prefix": f"idle{case}"}
        way = {"BACKEND": kind, "CONFIG": config}
        if kind == "memory":
            way = transport(kind, f"idle{case}", node)
        return EchoChannelLayer(transport=way, node=node, **CASES[case])

    # All at the same time: it is the waiting that takes long.
    with clean_layers(), caplog.at_level("INFO", logger="echomq"):
        pairs = [
            (make(kind, case, "a"), make(kind, case, "b"))
            for case in range(len(CASES))
            for kind in ("memory", CORE, PUBSUB)
        ]
        for pair in pairs:
            await meet(*pair)
        channels = [await subscriber(b) for _, b in pairs]
        caplog.clear()
        await asyncio.sleep(SECONDS)
        for (a, b), channel in zip(pairs, channels, strict=True):
            await write(a, 1)
            assert await take(b, channel) == [1]
    assert caplog.messages == []
