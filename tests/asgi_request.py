"""One plain request to an ASGI application in this event loop, and its answer as it comes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

TIMEOUT = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SentEvent:
    """One server-sent event; a comment has nothing but `comment`."""

    name: str = "message"
    id: str = ""
    text: str = ""
    retry: str = ""
    comment: bool = False

    @property
    def data(self) -> Any:
        return json.loads(self.text)


def parse_event(block: str) -> SentEvent:
    """Read one event, without the empty line that ends it."""
    fields: dict[str, str] = {}
    for line in block.split("\n"):
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        fields[name] = f"{fields[name]}\n{value}" if name == "data" in fields else value
    return SentEvent(
        name=fields.get("event", "message"),
        id=fields.get("id", ""),
        text=fields.get("data", ""),
        retry=fields.get("retry", ""),
        comment="" in fields,
    )


class AsgiRequest:
    """A request under way, from `async with`; its end is a client that goes away."""

    def __init__(
        self,
        application: Any,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        **query: Any,
    ) -> None:
        given = {"host": "testserver", **(headers or {})}
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": urlencode(query, doseq=True).encode(),
            "headers": [(k.lower().encode(), v.encode("latin1")) for k, v in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("testserver", 80),
        }
        self.reads = asyncio.Event()
        """Set: the client reads. Cleared: `send` waits, as under uvicorn."""
        self.reads.set()
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self._application = application
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._came = asyncio.Condition()
        self._taken = 0

    async def __aenter__(self) -> Self:
        await self._incoming.put({"type": "http.request", "body": b"", "more_body": False})
        self.task = asyncio.ensure_future(
            self._application(self.scope, self._incoming.get, self._send)
        )
        self.task.add_done_callback(lambda _: asyncio.ensure_future(self._notify()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.disconnect()

    async def disconnect(self) -> None:
        """Go away, and wait until the application has ended."""
        await self._incoming.put({"type": "http.disconnect"})
        await asyncio.wait_for(self.task, TIMEOUT)

    async def ended(self) -> None:
        """Wait for the end of the answer."""
        await asyncio.wait_for(self.task, TIMEOUT)
        assert self.complete

    async def event(self) -> SentEvent:
        """Wait for the next event."""
        async with asyncio.timeout(TIMEOUT), self._came:
            while (end := self.body.find(b"\n\n", self._taken)) < 0:
                assert not self.task.done(), (self.status, self.body, self.task)
                await self._came.wait()
        block, self._taken = self.body[self._taken : end].decode(), end + 2
        return parse_event(block)

    async def expect(self, name: str) -> SentEvent:
        """Wait for the next event, which has this name."""
        event = await self.event()
        assert event.name == name, event
        return event

    async def records(self, number: int) -> list[SentEvent]:
        """Wait for so many records, one event each."""
        return [await self.expect("message") for _ in range(number)]

    async def _send(self, message: dict[str, Any]) -> None:
        await self.reads.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.body += message["body"]
            self.complete = not message.get("more_body", False)
        await self._notify()

    async def _notify(self) -> None:
        async with self._came:
            self._came.notify_all()
