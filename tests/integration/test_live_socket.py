"""The websocket of live pages: subscribe, resume, fall behind, be refused."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection

from echomq_app import events
from echomq_app.core.ids import new_job_id
from echomq_app.core.records import StreamRecord
from echomq_app.live.consumers import EchoConsumer
from echomq_app.live.limits import Limits
from echomq_app.models import Record, sql
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Stream
from tests.live_client import IsoTime, LiveSocket

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def _everybody_may(settings: Any) -> None:
    settings.ECHOMQ = {"AUTHORIZE": lambda user, action, target: target != "secret"}


@contextlib.asynccontextmanager
async def live(consumer: Any = EchoConsumer) -> AsyncIterator[LiveSocket]:
    socket = LiveSocket(consumer.as_asgi())
    assert not (await socket.open())["user"]
    try:
        yield socket
    finally:
        await socket.close()


async def fill(name: str, number: int, start: int = 0) -> None:
    await Stream(name).aappend_many([{"data": {"n": n}} for n in range(start, start + number)])


def numbers(records: list[Any]) -> list[int]:
    return [record["data"]["n"] for record in records]


async def test_records_come_live_in_order_and_as_they_were_appended() -> None:
    async with live() as page:
        await page.subscribe("orders")
        receipt = await Stream("orders").aappend(
            {"n": 0, "text": "é\u2028", "float": 1e-7}, type="placed", key="7", headers={"h": [1]}
        )
        (record,) = await page.records(1)
        assert record == {
            "id": str(receipt.id),
            "position": 0,
            "type": "placed",
            "key": "7",
            "data": {"n": 0, "text": "é\u2028", "float": 1e-7},
            "headers": {"h": [1]},
            "recorded_at": IsoTime(receipt.recorded_at),
        }
        assert page.resume == receipt.token
        await fill("orders", 100, start=1)
        assert numbers(await page.records(100)) == list(range(1, 101))
        assert await page.nothing()


async def test_subscribed_before_any_record_dropped_three_appended_reconnected() -> None:
    async with live() as page:
        first = await page.subscribe("orders")
    assert (first["cursor"], first["head"], first["recovered"]) == (0, 0, True)
    await fill("orders", 3)
    async with live() as page:
        again = await page.subscribe("orders", resume=first["resume"])
        assert again["recovered"] and again["cursor"] == 0 and again["head"] == 3
        assert numbers(await page.records(3)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("start", "expected"), [("first", [0, 1, 2, 3, 4]), (3, [3, 4]), (5, []), ("head", [])]
)
async def test_from(start: int | str, expected: list[int]) -> None:
    await fill("orders", 5)
    async with live() as page:
        subscribed = await page.subscribe("orders", start=start)
        assert subscribed["recovered"]
        assert numbers(await page.records(len(expected))) == expected
        await fill("orders", 1, start=5)
        assert numbers(await page.records(1)) == [5]


async def test_a_long_replay_through_the_window() -> None:
    await fill("orders", 3_000)
    async with live() as page:
        await page.subscribe("orders", start="first")
        assert numbers(await page.records(3_000)) == list(range(3_000))


async def test_no_more_than_a_window_goes_unacknowledged() -> None:
    await fill("orders", 2_000)
    async with live() as page:
        await page.subscribe("orders", start="first")
        frames = [await page.expect("records")]
        while frames[-1]["cursor"] < 500:
            frames.append(await page.expect("records"))
        assert sum(len(frame["records"]) for frame in frames) == 500
        assert await page.nothing()
        await page.send({"type": "ack", "sub": 1, "cursor": frames[0]["cursor"]})
        came = 0
        while came < frames[0]["cursor"]:
            came += len((await page.expect("records"))["records"])
        assert came == frames[0]["cursor"]
        assert await page.nothing()


async def test_large_records_go_one_by_one() -> None:
    await Stream("orders").aappend_many([{"data": "x" * 200_000} for _ in range(5)])
    async with live() as page:
        await page.subscribe("orders", start="first")
        assert len((await page.expect("records"))["records"]) == 1
        assert len((await page.expect("records"))["records"]) == 1
        assert await page.nothing()
        await page.send({"type": "ack", "sub": 1, "cursor": 2})
        assert len(await page.records(3)) == 3


async def token_of(name: str) -> str:
    return (await Stream(name).ainfo()).token


class TestAnswersToTokens:
    """Trimmed, another epoch, from the future, malformed, diverged: each said, none mixed up."""

    async def expired(self, resume: str) -> dict[str, Any]:
        async with live() as page:
            subscribed = await page.subscribe("orders", resume=resume)
            assert not subscribed["recovered"]
            frame = await page.expect("cursor_expired", sub=1)
            # From there on it is live, and resumes.
            head = frame["head"]
            assert frame["cursor"] == head
            await fill("orders", 1, start=head)
            assert [record["position"] for record in await page.records(1)] == [head]
        return frame

    async def test_trimmed(self) -> None:
        await fill("orders", 3)
        token = await token_of("orders")
        await fill("orders", 7, start=3)
        await Stream("orders").atrim(max_records=4)
        frame = await self.expired(token)
        assert (frame["reason"], frame["requested"], frame["first"]) == ("trimmed", 3, 6)

    async def test_epoch(self) -> None:
        await fill("orders", 3)
        token = await token_of("orders")
        await Stream("orders").arotate_epoch()
        frame = await self.expired(token)
        assert (frame["reason"], frame["requested"]) == ("epoch", 3)
        assert not token.startswith(frame["epoch"])

    async def test_ahead(self) -> None:
        await fill("orders", 3)
        epoch = (await Stream("orders").ainfo()).epoch
        frame = await self.expired(f"{epoch}:9:00000000")
        assert (frame["reason"], frame["requested"]) == ("ahead", 9)

    @pytest.mark.parametrize("token", ["", "nonsense", "::", "0" * 200])
    async def test_malformed(self, token: str) -> None:
        await fill("orders", 3)
        frame = await self.expired(token)
        assert (frame["reason"], frame["requested"]) == ("malformed", None)

    @pytest.mark.parametrize("more", [0, 2])
    async def test_diverged(self, more: int) -> None:
        await fill("orders", 3)
        token = await token_of("orders")
        await fill("orders", more, start=3)
        other = token[:-1] + ("0" if token[-1] != "0" else "1")
        frame = await self.expired(other)
        assert (frame["reason"], frame["requested"]) == ("diverged", 3)


async def test_a_page_that_is_there_when_the_epoch_changes_is_told() -> None:
    await fill("orders", 2)
    async with live() as page:
        await page.subscribe("orders")
        epoch = await Stream("orders").arotate_epoch()
        frame = await page.expect("cursor_expired", reason="epoch", requested=2, epoch=epoch)
        await fill("orders", 1, start=2)
        assert numbers(await page.records(1)) == [2]
        assert frame["resume"].startswith(epoch)


async def test_a_slow_page_that_retention_overtakes_is_told() -> None:
    await fill("orders", 1_000)
    async with live() as page:
        await page.subscribe("orders", start="first")
        came: list[Any] = []
        while len(came) < 500:
            came += (await page.expect("records"))["records"]
        await fill("orders", 6_000, start=1_000)
        await Stream("orders").atrim(max_records=10)
        async with live() as other:  # makes the hub look
            await other.subscribe("orders")
        await page.send({"type": "ack", "sub": 1, "cursor": 500})
        while (frame := await page.receive())["type"] == "records":
            came += frame["records"]
            await page.send({"type": "ack", "sub": 1, "cursor": frame["cursor"]})
        assert numbers(came) == list(range(len(came)))
        assert frame["type"] == "cursor_expired" and frame["reason"] == "trimmed"
        assert frame["requested"] == len(came) and frame["cursor"] == 7_000


async def test_deleted_while_somebody_reads() -> None:
    await fill("orders", 2)
    async with live() as page:
        await page.subscribe("orders")
        await Stream("orders").adelete()
        await page.expect("error", code="unknown_stream", sub=1)
        again = await page.subscribe("orders", sub=2, resume="1" * 16 + ":2:")
        assert not again["recovered"]
        await page.expect("cursor_expired", sub=2, reason="epoch")


async def test_filters() -> None:
    await Stream("orders").aappend_many(
        [{"data": {"n": n}, "type": "ab"[n % 2], "key": str(n % 3)} for n in range(1_200)]
    )
    async with live() as page:
        await page.subscribe("orders", types=["a"], key="1", start="first")
        expected = [n for n in range(1_200) if n % 2 == 0 and n % 3 == 1]
        assert numbers(await page.records(len(expected))) == expected
        await Stream("orders").aappend({"n": -1}, type="b", key="1")
        await Stream("orders").aappend({"n": -2}, type="a", key="1")
        assert numbers(await page.records(1)) == [-2]
    async with live() as page:
        await page.subscribe("orders", sub=2, types=["none"], start="first")
        frame = await page.expect("records", sub=2, records=[])
        assert frame["cursor"] >= 500


async def test_a_mask_for_each_group_of_users() -> None:
    masked: list[int] = []

    @dataclasses.dataclass(frozen=True)
    class HideOdd:
        key = "public"

        def __call__(self, record: StreamRecord) -> StreamRecord | None:
            masked.append(record.position)
            if record.position % 2:
                return None
            return StreamRecord(
                **{f: getattr(record, f) for f in record.__struct_fields__ if f != "data"},
                data={"n": -record.data["n"]},
            )

    class Masking(EchoConsumer):
        async def mask_for(self, identity: Any, stream: str) -> Any:
            return HideOdd()

    await fill("orders", 6)
    async with live(Masking) as page, live(Masking) as other, live() as all_of_it:
        for socket in (page, other, all_of_it):
            await socket.subscribe("orders", start="first")
        assert numbers(await page.records(3)) == [0, -2, -4]
        assert numbers(await other.records(3)) == [0, -2, -4]
        assert numbers(await all_of_it.records(6)) == list(range(6))
    assert sorted(masked) == list(range(6)), "once for both"


async def test_many_subscriptions_on_one_socket() -> None:
    async with live() as page:
        for sub in range(10):
            await page.subscribe(f"s{sub}", sub=sub)
        await fill("s3", 1)
        assert numbers(await page.records(1, sub=3)) == [0]
        await page.send({"type": "unsubscribe", "sub": 3})
        await page.expect("unsubscribed", sub=3)
        await fill("s3", 1)
        await fill("s4", 1)
        assert numbers(await page.records(1, sub=4)) == [0]
        await page.subscribe("s3", sub=3)


async def test_events() -> None:
    async with live() as page:
        await page.send({"type": "subscribe", "sub": 5, "events": "emails"})
        await page.expect("subscribed", sub=5)
        job = new_job_id()
        await events.apublish("emails", "progress", job, {"fraction": 0.5})
        frame = await page.expect("event", sub=5, event="progress", job_id=str(job), number=0)
        assert frame["data"] == {"fraction": 0.5}
        for number in range(700):
            await events.apublish("emails", "progress", job, number)
        heard = [await page.expect("event") for _ in range(499)]
        assert [frame["data"] for frame in heard] == list(range(499))
        assert await page.nothing()
        await page.send({"type": "ack", "sub": 5, "cursor": 500})
        assert (await page.expect("event", number=500))["data"] == 499


class TestRefusals:
    async def test_denied(self) -> None:
        async with live() as page:
            await page.send({"type": "subscribe", "sub": 1, "stream": "secret"})
            await page.expect("error", sub=1, code="unauthenticated")
            await page.subscribe("orders")  # the number is free again
        assert not await StreamRow.objects.filter(name="secret").aexists()

    async def test_bad_name(self) -> None:
        async with live() as page:
            await page.send({"type": "subscribe", "sub": 1, "stream": "no spaces"})
            await page.expect("error", sub=1, code="bad_name")

    async def test_sub_in_use_and_unknown(self) -> None:
        async with live() as page:
            await page.subscribe("orders")
            await page.send({"type": "subscribe", "sub": 1, "stream": "other"})
            await page.expect("error", code="sub_in_use", sub=None)

    async def test_frames_that_cross_the_end_of_a_subscription_are_no_mistake(self) -> None:
        await fill("orders", 3)
        async with live() as page:
            await page.subscribe("orders", start="first")
            await page.records(3)
            for _ in range(2 * Limits().mistakes):
                await page.send({"type": "unsubscribe", "sub": 9})
                await page.expect("error", code="unknown_sub", sub=None)
            for _ in range(2 * Limits().mistakes):
                await page.send({"type": "ack", "sub": 1, "cursor": 50})
            assert await page.nothing()

    async def test_many_bad_frames_end_the_socket(self) -> None:
        async with live() as page:
            for _ in range(Limits().mistakes):
                await page.raw.send_to(text_data="{}")
                await page.expect("error", code="bad_frame")
            assert await page.closed() == 4400

    async def test_a_frame_too_large(self) -> None:
        async with live() as page:
            await page.raw.send_to(text_data='"' + "x" * 20_000 + '"')
            await page.expect("error", code="bad_frame")
            assert await page.closed() == 4413

    async def test_too_many_frames(self) -> None:
        async with live() as page:
            for _ in range(Limits().frames_at_once + 100):
                await page.send({"type": "ping"})
            while (frame := await page.receive())["type"] == "pong":
                pass
            assert frame["code"] == "rate"
            assert await page.closed() == 4429

    async def test_too_many_subscriptions(self) -> None:
        class Few(EchoConsumer):
            limits = Limits(subscriptions=2)

        async with live(Few) as page:
            await page.subscribe("a", sub=1)
            await page.subscribe("b", sub=2)
            await page.send({"type": "subscribe", "sub": 3, "stream": "c"})
            await page.expect("error", code="too_many", sub=3)

    async def test_nobody_who_reads_nothing(self) -> None:
        class Impatient(EchoConsumer):
            limits = Limits(login_timeout=0.05)

        async with live(Impatient) as page:
            await page.expect("error", code="unauthenticated")
            assert await page.closed() == 4401

    async def test_nothing_acknowledged(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("echomq_app.live.session.LOOK_EVERY", 0.05)

        class Impatient(EchoConsumer):
            limits = Limits(ack_timeout=0.1)

        await fill("orders", 600)
        async with live(Impatient) as page:
            await page.subscribe("orders", start="first")
            while (frame := await page.receive())["type"] == "records":
                pass
            assert frame["type"] == "error"
            assert await page.closed() == 4408


@pytest.mark.sqlite
async def test_history_that_diverged_under_a_page() -> None:
    await fill("orders", 2)
    async with live() as page:
        await page.subscribe("orders")
        await sync_to_async(_replace_last)()
        await page.expect("cursor_expired", reason="diverged", requested=2)


def _replace_last() -> None:
    sql.remove(connection)
    try:
        last = Record.objects.get(position=1)
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE echomq_record SET id = %s WHERE position = 1",
                [str(last.id.hex[:-8] + "00000000")],
            )
    finally:
        sql.install(connection)
