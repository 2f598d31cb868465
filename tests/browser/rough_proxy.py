"""A TCP proxy that breaks what goes through it, on demand."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class RoughProxy:
    """Passes bytes between clients on `port` and a server; see `rough_proxy`."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.server_port = server_port
        self.refusing = False
        self.passed = 0
        """How many connections it has let through."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._lost: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def swallow(self) -> None:
        """Let nothing more through on the connections there are; neither end is told."""
        self._lost |= self._writers

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection of a client's."""
        self._writers.add(writer)
        if self.refusing:
            writer.transport.abort()
            return
        try:
            theirs, ours = await asyncio.open_connection("127.0.0.1", self.server_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(ours)
        self.passed += 1
        for pump in (self._pump(reader, ours), self._pump(theirs, writer)):
            task = asyncio.create_task(pump)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Cut all, and wait until nothing of it is left."""
        self.cut()
        await asyncio.gather(*self._tasks)
        for writer in self._writers:
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if writer not in self._lost:
                    writer.write(data)
                    await writer.drain()
        if writer not in self._lost:
            writer.close()


@contextlib.asynccontextmanager
async def rough_proxy(server_port: int) -> AsyncIterator[RoughProxy]:
    """Run a proxy in front of a server on 127.0.0.1."""
    proxy = RoughProxy(server_port)
    listener = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.stop()
