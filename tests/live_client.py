"""A client of the websocket protocol for tests, frame by frame."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

from channels.testing import WebsocketCommunicator

Frame = dict[str, Any]


class LiveSocket:
    """One socket: sends frames, gives those that come, of one subscription or of all."""

    def __init__(self, application: Any, *, headers: dict[str, str] | None = None) -> None:
        pairs = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
        self.raw = WebsocketCommunicator(
            application, "/ws/echomq/", headers=pairs, subprotocols=["echomq.v1"]
        )
        self.kept: list[Frame] = []

    async def open(self) -> Frame:
        connected, subprotocol = await self.raw.connect(timeout=10)
        assert connected and subprotocol == "echomq.v1"
        return await self.expect("welcome")

    async def send(self, *frames: Frame) -> None:
        text = json.dumps(frames[0] if len(frames) == 1 else list(frames))
        await self.raw.send_to(text_data=text)

    async def receive(self, timeout: float = 10) -> Frame:
        frame: Frame = json.loads(await self.raw.receive_from(timeout=timeout))
        return frame

    async def expect(self, type: str, **fields: Any) -> Frame:
        """Return the next frame, which has to be of this type and have these values."""
        frame = await self.receive()
        assert frame["type"] == type, frame
        assert {name: frame.get(name) for name in fields} == fields, frame
        return frame

    async def subscribe(
        self, stream: str, sub: int = 1, *, start: int | str | None = None, **more: Any
    ) -> Frame:
        if start is not None:
            more["from"] = start
        await self.send({"type": "subscribe", "sub": sub, "stream": stream, **more})
        return await self.expect("subscribed", sub=sub)

    async def records(self, number: int, sub: int = 1) -> list[Frame]:
        """Return so many records of a subscription, acknowledging each frame."""
        found: list[Frame] = []
        while len(found) < number:
            frame = await self.expect("records", sub=sub)
            found += frame["records"]
            self.resume = frame["resume"]
            await self.send({"type": "ack", "sub": sub, "cursor": frame["cursor"]})
        assert len(found) == number, found[number:]
        return found

    async def nothing(self) -> bool:
        """Tell whether nothing comes: what was sent before has been answered, then a ping."""
        await self.send({"type": "ping"})
        return bool((await self.receive())["type"] == "pong")

    async def closed(self) -> int:
        """Wait for the close and return its code."""
        message = await self.raw.receive_output(timeout=10)
        assert message["type"] == "websocket.close", message
        code: int = message["code"]
        return code

    async def close(self) -> None:
        await self.raw.disconnect(timeout=10)


class IsoTime:
    """Equal to every ISO 8601 text of one time: PostgreSQL leaves trailing zeros out."""

    def __init__(self, time: dt.datetime) -> None:
        self.time = time

    def __eq__(self, text: object) -> bool:
        return isinstance(text, str) and dt.datetime.fromisoformat(text) == self.time

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return self.time.isoformat()
