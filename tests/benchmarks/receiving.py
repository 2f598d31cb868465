"""A process that counts what a channel layer delivers to a group, and says when.

`python -m tests.benchmarks.receiving '{"BACKEND": …, "CONFIG": …}' GROUP`. For each number N
on stdin it says "counting" and then, once N messages have come or none has for a while, a
line of JSON: how many came, and when the last one did (`time.monotonic`, the same clock in
all processes). The events of a message count one by one; a message with `m` doesn't count;
one with `ping` is answered at once, to the group "pong". It uses the layer as any consumer
would.
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
FIRST = 30.0
"""Seconds that the first one may take."""


class Receiver:
    """The other end of such a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    def expect(self, count: int) -> None:
        """Count from now on, up to `count`."""
        self._ask(f"{count}")

    def result(self) -> tuple[int, float]:
        """Return how many came, and when the last of them did."""
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
def receiver(layer: Mapping[str, Any], group: str) -> Iterator[Receiver]:
    """Run a receiving process for the length of the block."""
    command = [sys.executable, "-m", "tests.benchmarks.receiving", json.dumps(layer), group]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        if process.stdout is not None:
            process.stdout.readline()
        try:
            yield Receiver(process)
        finally:
            process.kill()


class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.last = 0.0

    def is_done(self, wanted: int) -> bool:
        return self.count >= wanted or time.monotonic() - self.last > SILENCE

    async def pump(self, layer: Any, channel: str) -> None:
        while True:
            message = await layer.receive(channel)
            if "ping" in message:
                await layer.group_send("pong", {"type": "x", "pong": message["ping"]})
            elif "m" not in message:
                before, self.last = self.count, time.monotonic()
                self.count += len(message.get("events", [message]))
                if before // 100 != self.count // 100:
                    await asyncio.sleep(0)  # some layers never give way by themselves


async def main(spec: dict[str, Any], group: str) -> None:
    layer = import_string(spec["BACKEND"])(**spec["CONFIG"])
    channel = await layer.new_channel()
    await layer.group_add(group, channel)
    counter = Counter()
    pump = asyncio.create_task(counter.pump(layer, channel))
    print("joined", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        counter.count, counter.last = 0, time.monotonic() + FIRST
        print("counting", flush=True)
        await wait_until_async(partial(counter.is_done, int(line)), timeout=600, poll=0.002)
        print(json.dumps({"count": counter.count, "at": counter.last}), flush=True)
    pump.cancel()


if __name__ == "__main__":
    settings.configure(ECHOMQ={})
    asyncio.run(main(json.loads(sys.argv[1]), sys.argv[2]))
