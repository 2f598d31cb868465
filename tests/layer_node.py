"""A process with one node of the layer, which writes down all that it sends and hears.

    python -m tests.layer_node '{"name": "a", "transport": {...}, "folder": "...", ...}'

It joins the group, says so in its history, and sends `rate` messages a second as long as
`folder`/write exists. When `folder`/end appears it drains, says what it has, and ends
cleanly. With `sends` it is a command instead: it hears nothing, sends that many, and ends.
On a transport of `tests.layer_transport`, what `folder`/cut lists is lost on its way here.

Its history is `folder`/NAME.LIFE.jsonl; what is in it, `tests.layer_history` reads. Times are
of the machine's monotonic clock, the same for all processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.conf import settings

from tests.layer_transport import Hub, hub
from tests.wait import wait_until_async

HUB = "processes"
"""What the instances of `tests.layer_transport` in this process are made for."""


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


async def send_all(layer: Any, life: str, count: int, log: Any) -> None:
    for number in range(count):
        log.write(json.dumps({"sends": number, "at": time.monotonic()}) + "\n")
        await layer.group_send("g", {"type": "x", "from": life, "n": number})


async def obey(hub: Hub, cut: Path) -> None:
    """Lose what the file says, as long as it is there."""
    while True:
        hub.cut = {(one, other) for one, other in json.loads(read(cut))}
        await asyncio.sleep(0.01)


def read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return "[]"


def say(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


async def main(config: dict[str, Any]) -> None:
    from echomq_app.layers import EchoChannelLayer, drain

    folder = Path(config["folder"])
    life = f"{config['name']}.{os.getpid()}"
    layer = EchoChannelLayer(
        transport=config["transport"], node=config["name"], **config["options"]
    )
    obeying = asyncio.create_task(obey(hub(HUB), folder / "cut"))
    with (folder / f"{life}.jsonl").open("w", buffering=1) as log:
        first = {"life": life, "node": config["name"]}
        if count := config["sends"]:
            log.write(json.dumps({**first, "at": None}) + "\n")
            await send_all(layer, life, count, log)
            await finish(count, log, drain)
        else:
            channel = await layer.new_channel()
            await layer.group_add("g", channel)
            log.write(json.dumps({**first, "at": time.monotonic()}) + "\n")
            hearing = asyncio.create_task(hear(layer, channel, log))
            say("joined")
            number = await send(layer, life, folder, config["rate"], log)
            await finish(number, log, drain)
            await wait_until_async((folder / "bye").exists, 120)
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
    obeying.cancel()
    await asyncio.gather(obeying, return_exceptions=True)


async def finish(number: int, log: Any, drain: Callable[[float], bool]) -> None:
    drained = await asyncio.to_thread(drain, 30.0)
    log.write(json.dumps({"sent": number, "drained": drained}) + "\n")
    say("drained")


if __name__ == "__main__":
    settings.configure(ECHOMQ={})
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    asyncio.run(main(json.loads(sys.argv[1])))
