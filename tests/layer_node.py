"""A process with one node of the layer, which writes down all that it sends and hears.

    python -m tests.layer_node '{"name": "a", "transport": {...}, "folder": "...", ...}'

It joins the group, says so in its history, and sends `rate` messages a second as long as
`folder`/write exists. When `folder`/end appears it drains, says what it has, and ends
cleanly. Its history is `folder`/NAME.LIFE.jsonl; what is in it, `tests.layer_history` reads.
Times are of the machine's monotonic clock, the same for all processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from django.conf import settings

from tests.wait import wait_until_async


async def hear(layer: Any, channel: str, log: Any) -> None:
    while True:
        message = await layer.receive(channel)
        if message["type"] == "echo.cursor_expired":
            entry: dict[str, Any] = {"told": message["node"], "missed": message["missed"]}
        else:
            entry = {"from": message["from"], "n": message["n"]}
        log.write(json.dumps(entry) + "\n")


async def send(layer: Any, life: str, folder: Path, rate: float, log: Any) -> int:
    number = 0
    began: float | None = None
    while not (folder / "end").exists():
        if not (folder / "write").exists():
            began = None
        else:
            if began is None:
                began, first = time.monotonic(), number
            due = first + int((time.monotonic() - began) * rate)
            # After a stop it doesn't catch up: the pace is what counts.
            if due - number > rate:
                began, first = time.monotonic(), number
                continue
            while number < due:
                log.write(json.dumps({"sends": number, "at": time.monotonic()}) + "\n")
                await layer.group_send("g", {"type": "x", "from": life, "n": number})
                number += 1
        await asyncio.sleep(0.005)
    return number


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


async def main(config: dict[str, Any]) -> None:
    from echomq_app.layers import EchoChannelLayer, drain

    folder = Path(config["folder"])
    life = f"{config['name']}.{os.getpid()}"
    with (folder / f"{life}.jsonl").open("w", buffering=1) as log:
        layer = EchoChannelLayer(
            transport=config["transport"], node=config["name"], **config["options"]
        )
        channel = await layer.new_channel()
        await layer.group_add("g", channel)
        log.write(json.dumps({"life": life, "node": config["name"], "at": time.monotonic()}) + "\n")
        hearing = asyncio.create_task(hear(layer, channel, log))
        say("joined")
        number = await send(layer, life, folder, config["rate"], log)
        drained = await asyncio.to_thread(drain, 30.0)
        log.write(json.dumps({"sent": number, "drained": drained}) + "\n")
        say("drained")
        await wait_until_async((folder / "bye").exists, 120)
        hearing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hearing


if __name__ == "__main__":
    settings.configure(ECHOMQ={})
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    asyncio.run(main(json.loads(sys.argv[1])))
