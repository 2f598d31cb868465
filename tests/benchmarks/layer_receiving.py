"""A process that hears a group of any channel layer, counts, and answers pings.

`python -m tests.benchmarks.layer_receiving '{"BACKEND": …, "CONFIG": …}'`. For each number
N on stdin it says "counting", and then, once N messages have come or none has for a while,
how many came and how long after the first one the last one did. A message with `ping` is
answered at once, to the group "pong".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

from tests.layers import ROOT
from tests.wait import wait_until_async

SILENCE = 3.0
"""Seconds without a message after which the rest counts as lost."""


class Ear:
    """The other end of such a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def expect(self, count: int) -> None:
        """Count from now on, up to `count`."""
        if self._process.stdin is not None:
            self._process.stdin.write(f"{count}\n")
            self._process.stdin.flush()
        self._read()

    def result(self) -> int:
        """Wait until they have come, and return how many did."""
        return int(self._read())

    def _read(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError("The receiving process has ended.")
        return line.strip()


@contextlib.contextmanager
def ear(layer: Mapping[str, Any]) -> Iterator[Ear]:
    """Run such a process for the length of the block."""
    command = [sys.executable, "-m", "tests.benchmarks.layer_receiving", json.dumps(layer)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        if process.stdout is not None:
            process.stdout.readline()
        try:
            yield Ear(process)
        finally:
            process.kill()


class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.last = time.monotonic()

    def is_done(self, wanted: int) -> bool:
        return self.count >= wanted or time.monotonic() - self.last > SILENCE

    async def pump(self, layer: Any, channel: str) -> None:
        while True:
            message = await layer.receive(channel)
            if "ping" in message:
                await layer.group_send("pong", {"type": "x", "pong": message["ping"]})
            elif "n" in message:
                self.count += 1
                self.last = time.monotonic()
                if self.count % 100 == 0:
                    await asyncio.sleep(0)


async def main(spec: dict[str, Any]) -> None:
    layer = import_string(spec["BACKEND"])(**spec["CONFIG"])
    channel = await layer.new_channel()
    await layer.group_add("bench", channel)
    counter = Counter()
    pump = asyncio.create_task(counter.pump(layer, channel))
    print("joined", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        counter.count, counter.last = 0, time.monotonic() + 30  # until the first one
        print("counting", flush=True)
        await wait_until_async(partial(counter.is_done, int(line)), timeout=600, poll=0.002)
        print(counter.count, flush=True)
    pump.cancel()


if __name__ == "__main__":
    settings.configure(ECHOMQ={})
    asyncio.run(main(json.loads(sys.argv[1])))
