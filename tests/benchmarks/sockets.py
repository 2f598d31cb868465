"""A process with many websockets that counts the records which they get, and says when.

    python -m tests.benchmarks.sockets URL CLIENTS [--deflate]

Reads lines of JSON: `{"subscribe": FRAME or null}` opens the sockets and answers when all
are subscribed; `{"expect": N}` answers once each has got N records, or none came for a
while, with how many came in all and when the last one did (`time.monotonic`);
`{"close": true}` closes them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect

from tests.layers import ROOT
from tests.wait import wait_until_async

SILENCE = 5.0


class Frame(msgspec.Struct):
    """What matters of a frame: how many records it has, and what to acknowledge."""

    type: str = "record"
    records: list[msgspec.Raw] = []
    cursor: int = 0


class Client:
    """One socket."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.count = 0
        self.last = 0.0
        self.subscribed = asyncio.Event()
        self.task = asyncio.create_task(self._pump())

    async def _pump(self) -> None:
        decode = msgspec.json.Decoder(Frame).decode
        unacked = 0
        async for message in self.connection:
            frame = decode(message)
            if frame.type == "records":
                self.count += len(frame.records)
                unacked += len(frame.records)
                if unacked >= 100:
                    unacked = 0
                    ack = f'{{"type":"ack","sub":1,"cursor":{frame.cursor}}}'
                    await self.connection.send(ack)
            elif frame.type == "record":
                self.count += 1
            elif frame.type == "subscribed":
                self.subscribed.set()
                continue
            elif frame.type != "welcome":
                raise RuntimeError(f"unexpected: {message!r:.200}")
            self.last = time.monotonic()


class Sockets:
    """The other end of such a process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, **question: Any) -> Any:
        """Ask one thing and return the answer."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self.answer()

    def begin(self, **question: Any) -> None:
        """Ask, without waiting: `answer` does."""
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError("The process with the sockets has ended.")
        return json.loads(line)


@contextlib.contextmanager
def sockets(url: str, clients: int, *options: str) -> Iterator[Sockets]:
    """Run such a process for the length of the block."""
    command = [sys.executable, "-m", "tests.benchmarks.sockets", url, str(clients), *options]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Sockets(process)
        finally:
            process.terminate()


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("clients", type=int)
    parser.add_argument("--deflate", action="store_true")
    given = parser.parse_args()
    clients: list[Client] = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        question = json.loads(line)
        if "subscribe" in question:
            clients = await _open(given, question["subscribe"])
            answer: Any = len(clients)
        elif "expect" in question:
            answer = await _count(clients, question["expect"])
        else:
            await asyncio.gather(*(client.connection.close() for client in clients))
            answer = True
        print(json.dumps(answer), flush=True)


async def _open(given: argparse.Namespace, frame: Any) -> list[Client]:
    clients = []
    for _ in range(given.clients):
        compression = "deflate" if given.deflate else None
        connection = await connect(given.url, compression=compression, ping_interval=None)
        client = Client(connection)
        clients.append(client)
        if frame is not None:
            await connection.send(json.dumps(frame))
    for client in clients:
        await client.subscribed.wait()
    return clients


async def _count(clients: list[Client], wanted: int) -> dict[str, float]:
    began = time.monotonic()

    def done() -> bool:
        if all(client.count >= wanted for client in clients):
            return True
        last = max(began, *(client.last for client in clients))
        return time.monotonic() - last > SILENCE

    await wait_until_async(done, timeout=600, poll=0.02)
    result = {
        "count": sum(client.count for client in clients),
        "at": max(client.last for client in clients),
    }
    for client in clients:
        client.count = 0
    return result


if __name__ == "__main__":
    asyncio.run(main())
