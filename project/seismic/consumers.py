"""One websocket of the page: the feed and the log, side by side.

A message is a JSON array of frames. From the page: `follow {token}` once, and an `ack`
for each `records`. To the page: `hello`, `following` (where the log begins), `records`,
`event`, `gap`, `cursor_expired`, `cursor_invalid`, `error`, and `beat` when idle.

Three tasks do the work, so that a dispatch never waits for a slow page: one hears the
feed, one reads the log, one writes. The log's reader stops while WINDOW pages are
unacknowledged, because servers differ in how much they buffer for a page that doesn't
read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from channels.generic.websocket import AsyncWebsocketConsumer

from echomq_app import events
from echomq_app.exceptions import CursorExpired, CursorInvalid, UnknownStream
from echomq_app.stream import Page, Stream

from . import feed
from .outgoing import Frame, Outgoing
from .quakes import QUEUE, STREAM

logger = logging.getLogger("project.seismic")

PAGE = 100
WINDOW = 8
BEAT = 5.0
BREATH = 0.04
"""Seconds between two messages, and two looks at the log: a fast replay wakes its readers
hundreds of times a second, and nobody sees more than a few changes."""
JOIN_TIMEOUT = 2.0
"""How long the log waits for the feed to be joined: a broker that is away can't hold it."""
FRAME_MAX = 4_096
MISTAKES_MAX = 10
BAD_FRAMES, FAILED = 4400, 1011


class BadFrame(Exception):
    """What the page sent is none of the frames above."""


class SeismicConsumer(AsyncWebsocketConsumer):
    """Sends the page what the feed tells and what the log holds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._out = Outgoing()
        self._tasks: set[asyncio.Task[None]] = set()
        self._joined = asyncio.Event()
        self._window = asyncio.BoundedSemaphore(WINDOW)
        self._following = False
        self._mistakes = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run until the socket is gone, however it goes, and leave no task behind."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def connect(self) -> None:
        await self.accept()
        self._out.offer({"kind": "hello", "broker": feed.crosses_processes()})
        self._start(self._write())
        self._start(self._hear_feed())

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        try:
            self._obey(_parse(text_data))
        except BadFrame as error:
            self._mistakes += 1
            self._out.offer({"kind": "error", "code": "bad_frame", "message": str(error)})
            if self._mistakes >= MISTAKES_MAX:
                self._out.end(BAD_FRAMES)

    def _obey(self, frame: Frame) -> None:
        match frame:
            case {"kind": "ack"}:
                with contextlib.suppress(ValueError):  # one too many
                    self._window.release()
            case {"kind": "follow", "token": (str() | None) as token}:
                if self._following:
                    raise BadFrame("This socket follows the log already; open another one.")
                self._following = True
                self._start(self._read_log(token))
            case _:
                raise BadFrame('Expected {"kind": "follow", "token": …} or {"kind": "ack"}.')

    async def _hear_feed(self) -> None:
        async with events.listen(QUEUE) as heard:
            self._joined.set()
            async for item in heard:
                self._out.offer(_feed_frame(item))

    async def _read_log(self, token: str | None) -> None:
        # Listen first, then read: what is written in between comes twice, not never.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._joined.wait(), JOIN_TIMEOUT)
        told: str | None = None
        while True:
            try:
                async for page in self._pages(token):
                    if page is None:
                        told = ""
                        await self._out.put(_following("", 0, 0))
                        continue
                    if page.epoch != told:
                        told = page.epoch
                        await self._out.put(
                            _following(page.epoch, page.first_position, page.write_cursor)
                        )
                    if page.records:
                        await self._window.acquire()
                        await self._out.put(_records(page))
                    if page.cursor == page.write_cursor:
                        await asyncio.sleep(BREATH)
            except CursorExpired as error:
                await self._out.put(_cursor_frame("cursor_expired", error, missed=error.missed))
            except CursorInvalid as error:
                told = None
                await self._out.put(_cursor_frame("cursor_invalid", error, reason=error.reason))
            except UnknownStream:
                told = None  # Deleted while we waited: what comes is another life of it.
            token = None

    async def _pages(self, token: str | None) -> AsyncIterator[Page | None]:
        """Give the page at `token`, even an empty one (`None`: no log yet), then what comes."""
        stream = Stream(STREAM)
        try:
            page = await stream.aread(token, limit=PAGE)
        except UnknownStream:
            yield None
        else:
            yield page
            token = page.token
        async for page in stream.atail_pages(token, limit=PAGE):
            yield page

    async def _write(self) -> None:
        with contextlib.suppress(OSError):  # The page is gone; its disconnect comes by itself.
            while not self._out.finished:
                frames = await self._out.take(BEAT)
                await self.send(text_data=json.dumps(frames or [{"kind": "beat"}]))
                await asyncio.sleep(BREATH)
            await self.close(code=self._out.close_code)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        # The page reconnects with its token, so nothing is lost by starting afresh.
        logger.error("event=page_failed error=%r", task.exception(), exc_info=task.exception())
        self._out.end(FAILED)


def _parse(text: str | None) -> Frame:
    if text is None:
        raise BadFrame("Frames are JSON text, not bytes.")
    if len(text) > FRAME_MAX:
        raise BadFrame(f"A frame has at most {FRAME_MAX:,} characters, this one {len(text):,}.")
    try:
        frame = json.loads(text)
    except (ValueError, RecursionError):
        raise BadFrame("That is no JSON.") from None
    if not isinstance(frame, dict):
        raise BadFrame("A frame is a JSON object.")
    return frame


def _feed_frame(item: events.Event | events.Gap) -> Frame:
    if isinstance(item, events.Gap):
        return {"kind": "gap", "why": item.reason}
    return {
        "kind": "event",
        "event": item.event,
        "job_id": str(item.job_id),
        "data": item.data,
    }


def _following(epoch: str, first: int, head: int) -> Frame:
    return {"kind": "following", "epoch": epoch, "first": first, "head": head}


def _records(page: Page) -> Frame:
    return {
        "kind": "records",
        "epoch": page.epoch,
        "first": page.first_position,
        "head": page.write_cursor,
        "cursor": page.cursor,
        "token": page.token,
        "records": [
            {
                "id": str(record.id),
                "position": record.position,
                "type": record.type,
                "key": record.key,
                "data": record.data,
                "recorded_at": record.recorded_at.isoformat(),
            }
            for record in page.records
        ],
    }


def _cursor_frame(kind: str, error: CursorExpired | CursorInvalid, **more: Any) -> Frame:
    return {
        "kind": kind,
        "first": error.first_position,
        "head": error.write_cursor,
        "epoch": error.epoch,
        **more,
    }
