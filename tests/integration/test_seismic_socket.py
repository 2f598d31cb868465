"""The seismic page's websocket: the log resumes, the feed doesn't hold it up, nothing piles up."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from channels.routing import URLRouter
from channels.security.websocket import OriginValidator
from channels.testing import WebsocketCommunicator

from echomq_app import events
from echomq_app.core.ids import new_job_id
from echomq_app.stream import Stream
from project.asgi import application
from project.seismic import consumers
from project.seismic.outgoing import Outgoing
from project.seismic.quakes import QUAKE, QUEUE, STREAM
from project.seismic.routing import websocket_urlpatterns
from tests.wait import wait_until_async

pytestmark = pytest.mark.django_db(transaction=True)

Frame = dict[str, Any]
ORIGIN = (b"origin", b"http://testserver")


class Socket:
    """A page that has connected, frame by frame."""

    def __init__(self, communicator: WebsocketCommunicator) -> None:
        self.raw = communicator
        self._frames: list[Frame] = []

    async def send(self, frame: Any) -> None:
        await self.raw.send_to(text_data=json.dumps(frame))

    async def receive(self) -> Frame:
        while not self._frames:
            self._frames = json.loads(await self.raw.receive_from(timeout=10))
        return self._frames.pop(0)

    async def expect(self, *kinds: str) -> Frame:
        """Return the next frame, past beats alone; it has to be of one of these kinds."""
        while (frame := await self.receive())["kind"] == "beat":
            pass
        assert frame["kind"] in kinds, frame
        return frame

    async def follow(self, token: str | None = None) -> Frame:
        await self.send({"kind": "follow", "token": token})
        return await self.expect("following")

    async def records(self, number: int) -> list[Frame]:
        """Return this many records, acknowledging each page."""
        found: list[Frame] = []
        while len(found) < number:
            page = await self.expect("records")
            await self.send({"kind": "ack"})
            found += page["records"]
        return found


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[Socket]:
    communicator = WebsocketCommunicator(application, "/ws/seismic/", headers=[ORIGIN])
    accepted, _ = await communicator.connect(timeout=10)
    assert accepted
    socket = Socket(communicator)
    try:
        yield socket
    finally:
        await communicator.disconnect(timeout=10)


async def append(first: int, count: int) -> list[str]:
    """Append small records; return the token after each."""
    records = [{"data": {"n": n}} for n in range(first, first + count)]
    return [receipt.token for receipt in await Stream(STREAM).aappend_many(records)]


async def test_log_comes_whole_whatever_the_page_size_and_then_goes_on() -> None:
    total = consumers.PAGE * 2 + 1
    await append(0, total)
    async with connected() as socket:
        assert (await socket.expect("hello"))["broker"] is False
        following = await socket.follow()
        assert (following["first"], following["head"]) == (0, total)
        records = await socket.records(total)
        assert [record["position"] for record in records] == [*range(total)]
        assert [record["data"]["n"] for record in records] == [*range(total)]
        await append(total, 1)
        (more,) = await socket.records(1)
        assert more["position"] == total


async def test_token_of_an_earlier_connection_resumes_after_its_record() -> None:
    await append(0, 5)
    async with connected() as socket:
        await socket.expect("hello")
        await socket.follow()
        page = await socket.expect("records")
    await append(5, 3)
    async with connected() as socket:
        await socket.expect("hello")
        following = await socket.follow(page["token"])
        assert following["epoch"] == page["epoch"]
        assert [r["position"] for r in (await socket.expect("records"))["records"]] == [5, 6, 7]


async def test_log_that_is_not_there_yet_is_followed_from_its_first_record() -> None:
    async with connected() as socket:
        await socket.expect("hello")
        assert (await socket.follow())["epoch"] == ""
        await append(0, 1)
        assert (await socket.expect("following"))["epoch"] != ""
        assert [r["position"] for r in await socket.records(1)] == [0]


async def test_expired_token_is_told_and_then_the_rest_comes() -> None:
    tokens = await append(0, 10)
    await Stream(STREAM).atrim(max_records=4)
    async with connected() as socket:
        await socket.expect("hello")
        await socket.send({"kind": "follow", "token": tokens[1]})
        expired = await socket.expect("cursor_expired")
        assert (expired["first"], expired["head"], expired["missed"]) == (6, 10, 4)
        await socket.expect("following")
        assert [r["position"] for r in await socket.records(4)] == [6, 7, 8, 9]


@pytest.mark.parametrize("token", ["nonsense", "0123456789abcdef:3:00000000", "-1", "a:b:c"])
async def test_token_that_is_none_of_this_log_is_told_and_the_log_begins_anew(token: str) -> None:
    await append(0, 2)
    async with connected() as socket:
        await socket.expect("hello")
        await socket.send({"kind": "follow", "token": token})
        invalid = await socket.expect("cursor_invalid")
        assert invalid["reason"] in {"malformed", "epoch"}
        await socket.expect("following")
        assert [r["position"] for r in await socket.records(2)] == [0, 1]


async def test_log_deleted_under_a_waiting_page_begins_another_life() -> None:
    await append(0, 2)
    async with connected() as socket:
        await socket.expect("hello")
        epoch = (await socket.follow())["epoch"]
        await socket.records(2)
        await Stream(STREAM).adelete()
        # Which of the two depends on whether the reader waited, or was about to.
        frame = await socket.expect("following", "cursor_invalid")
        assert frame.get("reason") == "epoch" or frame["epoch"] == ""
        await append(0, 1)
        while (await socket.expect("following"))["epoch"] in {"", epoch}:
            pass
        assert [r["position"] for r in await socket.records(1)] == [0]


async def test_events_arrive_beside_the_log() -> None:
    job_id = new_job_id()
    async with connected() as socket:
        await socket.expect("hello")
        await socket.follow()  # answered once the feed is joined
        events.publish(QUEUE, QUAKE, job_id, {"position": 7})
        event = await socket.expect("event")
        assert (event["event"], event["job_id"], event["data"]) == (
            QUAKE,
            str(job_id),
            {"position": 7},
        )


async def test_page_that_acknowledges_nothing_gets_a_window_and_then_the_rest() -> None:
    pages = consumers.WINDOW + 3
    await append(0, pages * consumers.PAGE)
    async with connected() as socket:
        await socket.expect("hello")
        await socket.follow()
        seen = [await socket.expect("records") for _ in range(consumers.WINDOW)]
        # Events still come: the feed isn't stuck behind the log.
        events.publish(QUEUE, "progress", new_job_id(), {"fraction": 0.5})
        assert (await socket.expect("event"))["event"] == "progress"
        assert await socket.raw.receive_nothing(timeout=0.3)
        for _ in range(3):
            await socket.send({"kind": "ack"})
        seen += [await socket.expect("records") for _ in range(3)]
        positions = [record["position"] for page in seen for record in page["records"]]
        assert positions == [*range(pages * consumers.PAGE)]


async def test_acknowledging_too_often_widens_no_window() -> None:
    await append(0, (consumers.WINDOW + 2) * consumers.PAGE)
    async with connected() as socket:
        await socket.expect("hello")
        for _ in range(50):
            await socket.send({"kind": "ack"})
        await socket.follow()
        for _ in range(consumers.WINDOW):
            await socket.expect("records")
        assert await socket.raw.receive_nothing(timeout=0.3)


BAD: list[str | bytes] = [
    " ",
    "{",
    "[]",
    "7",
    "null",
    '"follow"',
    "{}",
    '{"kind": "follow"}',
    '{"kind": "follow", "token": 5}',
    '{"kind": "nonsense"}',
    "[" * 3_000,
    "x" * (consumers.FRAME_MAX + 1),
    b"bytes",
]


@pytest.mark.parametrize("bad", BAD)
async def test_bad_frame_gets_an_answer_and_the_socket_stays_open(bad: str | bytes) -> None:
    await append(0, 1)
    async with connected() as socket:
        await socket.expect("hello")
        if isinstance(bad, bytes):
            await socket.raw.send_to(bytes_data=bad)
        else:
            await socket.raw.send_to(text_data=bad)
        assert (await socket.expect("error"))["code"] == "bad_frame"
        await socket.follow()
        assert len(await socket.records(1)) == 1


async def test_page_that_goes_on_with_bad_frames_is_closed() -> None:
    async with connected() as socket:
        await socket.expect("hello")
        for _ in range(consumers.MISTAKES_MAX):
            await socket.send({"kind": "nonsense"})
        for _ in range(consumers.MISTAKES_MAX):
            await socket.expect("error")
        assert (await socket.expect("bye"))["code"] == consumers.BAD_FRAMES
        closed = await socket.raw.receive_output(timeout=10)
        assert (closed["type"], closed["code"]) == ("websocket.close", consumers.BAD_FRAMES)


async def test_one_socket_follows_once() -> None:
    async with connected() as socket:
        await socket.expect("hello")
        await socket.follow()
        await socket.send({"kind": "follow", "token": None})
        assert "already" in (await socket.expect("error"))["message"]


async def test_page_of_another_site_is_turned_away() -> None:
    # The validator read ALLOWED_HOSTS when the application was made, and the tests' is "*".
    guarded = OriginValidator(URLRouter(websocket_urlpatterns), ["testserver"])
    for origin, welcome in ((b"https://elsewhere.example", False), (b"http://testserver", True)):
        communicator = WebsocketCommunicator(guarded, "/ws/seismic/", headers=[(b"origin", origin)])
        accepted, _ = await communicator.connect(timeout=10)
        assert accepted is welcome
        if accepted:
            await communicator.disconnect(timeout=10)
    assert isinstance(websocket_urlpatterns[0].callback, OriginValidator)


async def test_no_task_is_left_when_the_page_is_gone() -> None:
    before = asyncio.all_tasks()
    await append(0, 1)
    async with connected() as socket:
        await socket.expect("hello")
        await socket.follow()
        await socket.records(1)
    await wait_until_async(lambda: asyncio.all_tasks() <= before, 10, "the page's tasks end")


async def test_a_fault_closes_the_socket_and_the_page_may_come_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Stream, *args: object, **kwargs: object) -> None:
        raise RuntimeError("the disk is on fire")

    await append(0, 1)
    monkeypatch.setattr(Stream, "read", broken)
    async with connected() as socket:
        await socket.expect("hello")
        await socket.send({"kind": "follow", "token": None})
        assert (await socket.expect("bye"))["code"] == consumers.FAILED
        assert (await socket.raw.receive_output(timeout=10))["code"] == consumers.FAILED
    assert "the disk is on fire" in caplog.text


async def test_feed_that_outruns_the_page_loses_events_and_says_how_many() -> None:
    out = Outgoing(room=3)
    for number in range(5):
        out.offer({"kind": "event", "n": number})
    frames = await out.take(timeout=1)
    assert [frame.get("n") for frame in frames[:3]] == [0, 1, 2]
    assert frames[3] == {"kind": "gap", "why": "this page was too slow for 2 event(s)"}
    assert await out.take(timeout=0.01) == []


async def test_log_waits_for_room_instead() -> None:
    out = Outgoing(room=1)
    await out.put({"n": 0})
    waiting = asyncio.create_task(out.put({"n": 1}))
    await asyncio.sleep(0)
    assert not waiting.done()
    taken = await out.take(timeout=1)
    await waiting
    while len(taken) < 2:  # whether the second came with the first is the loop's affair
        taken += await out.take(timeout=1)
    assert taken == [{"n": 0}, {"n": 1}]


async def test_end_is_told_even_when_there_is_no_room() -> None:
    out = Outgoing(room=1)
    await out.put({"n": 0})
    out.end(4400)
    out.end(1011)
    waits = not out.finished
    await out.take(timeout=1)
    assert waits and out.finished
    assert out.close_code == 4400
