"""A process that counts the events that a channel layer delivers, and says when.

`python -m tests.benchmarks.receiving BACKEND URL GROUP`. For each number N on stdin it
answers with a line of JSON once N events have come, or none has for a while: how many
came, and when the last one did (`time.monotonic`, the same clock in all processes).
It uses the layer as any consumer would, and nothing of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from django.utils.module_loading import import_string

from tests.layers import ROOT
from tests.wait import wait_until_async

SILENCE = 2.0
"""Seconds without an event after which the rest counts as lost."""


class Receiver:
    """The other end of such a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def expect(self, count: int) -> None:
        """Count from now on, up to `count`."""
        self._ask(f"{count}")

    def result(self) -> tuple[int, float]:
        """Return how many events came, and when the last of them did."""
        answer = json.loads(self._read())
        return answer["count"], answer["at"]

    def _ask(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        self._read()

    def _read(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError("The receiving process has ended.")
        return line


@contextlib.contextmanager
def receiver(backend: str, url: str, group: str) -> Iterator[Receiver]:
    """Run a receiving process for the length of the block."""
    command = [sys.executable, "-m", "tests.benchmarks.receiving", backend, url, group]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        if process.stdout is not None:
            process.stdout.readline()
        try:
            yield Receiver(process)
        finally:
            process.terminate()


class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.last = 0.0

    def is_done(self, wanted: int) -> bool:
        return self.count >= wanted or time.monotonic() - self.last > SILENCE

    async def pump(self, layer: Any, channel: str) -> None:
        while True:
            message = await layer.receive(channel)
            self.count += len(message.get("events", [message]))
            self.last = time.monotonic()


async def main(backend: str, url: str, group: str) -> None:
    layer = import_string(backend)(hosts=[{"address": url, "socket_timeout": None}])
    channel = await layer.new_channel()
    await layer.group_add(group, channel)
    counter = Counter()
    pump = asyncio.create_task(counter.pump(layer, channel))
    print("joined", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        wanted, counter.count, counter.last = int(line), 0, time.monotonic()
        print("counting", flush=True)
        await wait_until_async(partial(counter.is_done, wanted), timeout=600)
        print(json.dumps({"count": counter.count, "at": counter.last}), flush=True)
    pump.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
