"""How deeply data may be nested, and what becomes of a record that nobody can decode."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import DatabaseError, connection, transaction
from django.test import Client
from pytest_django.fixtures import Settings

from echomq_app.core.payload import MAX_DEPTH
from echomq_app.core.records import StreamRecord
from echomq_app.exceptions import CursorInvalid, InvalidPayload, UndecodableRecord
from echomq_app.jobs.tasks_api import task
from echomq_app.live.consumers import EchoConsumer
from echomq_app.models import Outbox, Record
from echomq_app.stream import Stream
from project.asgi import application
from tests.asgi_request import AsgiRequest
from tests.live_client import LiveSocket

pytestmark = pytest.mark.django_db(transaction=True)

BEYOND = 25_000
"""No parser of Python's goes so deep."""


def nested(depth: int, text: str = "") -> str:
    """Return JSON of so many arrays and objects inside each other."""
    pairs = depth // 2
    return '[{"a":' * pairs + ("[" * (depth % 2)) + text + ("]" * (depth % 2)) + "}]" * pairs


def call(function: str, stream: str, records: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT FROM {function}(%s, %s::jsonb)", [stream, records])


@pytest.mark.postgres
class TestSQL:
    """SQL clients and triggers hold to the limit of Python."""

    @pytest.mark.parametrize("stream", ["orders", "emq.mail"])
    @pytest.mark.parametrize("field", ["data", "headers"])
    @pytest.mark.parametrize("function", ["echomq_append_v1", "echomq_append_on_commit_v1"])
    def test_one_level_decides(self, function: str, field: str, stream: str) -> None:
        for text in ("1", "{}") if field == "data" else ("1",):
            depth = MAX_DEPTH - (text == "{}")
            record = '{"data": 1, "%s": %s}'
            call(function, stream, f"[{record % (field, nested(depth, text))}]")
            with pytest.raises(DatabaseError, match="nested deeper than 100 levels"):
                call(function, stream, f"[{record % (field, nested(depth + 1, text))}]")
        Stream(stream).relay()
        assert Record.objects.exists() and not Outbox.objects.exists()
        assert [r.position for r in Stream(stream).replay()] == list(range(Record.objects.count()))

    @pytest.mark.parametrize("function", ["echomq_append_v1", "echomq_append_on_commit_v1"])
    def test_a_value_that_a_table_holds_compressed(self, function: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute("CREATE TABLE t (records jsonb)")
            try:
                records = f'[{{"data": {nested(MAX_DEPTH + 1, "1")}, "pad": "{"x" * 5_000}"}}]'
                cursor.execute("INSERT INTO t VALUES (%s)", [records])
                cursor.execute("SELECT pg_column_size(records) FROM t")
                assert cursor.fetchone()[0] < 800
                with pytest.raises(DatabaseError, match="nested deeper"):
                    cursor.execute(f"SELECT {function}('orders', records) FROM t")
            finally:
                cursor.execute("DROP TABLE t")
        assert not Record.objects.exists()

    def test_what_the_relay_moves_was_checked_before(self) -> None:
        def serializable() -> None:
            with transaction.atomic():
                with connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
                records = f'[{{"data": {nested(MAX_DEPTH + 1, "1")}}}]'
                call("echomq_append_on_commit_v1", "orders", records)

        with pytest.raises(DatabaseError, match="nested deeper"):
            serializable()
        assert not Outbox.objects.exists()


def test_the_deepest_that_is_taken_comes_back_everywhere(admin_client: Client) -> None:
    data = json.loads(nested(MAX_DEPTH, "1"))
    stream = Stream("orders")
    stream.append(data, headers={"a": json.loads(nested(MAX_DEPTH - 1, "1"))})
    (record,) = stream.read().records
    assert record.data == data
    page = admin_client.get(f"/admin/echomq/record/{record.id}/change/")
    assert page.status_code == 200


@task
def takes(value: Any) -> None: ...


def test_arguments_of_jobs() -> None:
    takes.enqueue(json.loads(nested(MAX_DEPTH - 2, "1")))
    with pytest.raises(InvalidPayload, match="nested deeper"):
        takes.enqueue(json.loads(nested(MAX_DEPTH - 1, "1")))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidPayload, match="contains itself"):
        takes.enqueue(loop)


@pytest.fixture
def broken() -> Stream:
    """Three records, of which plain SQL wrote the second, deeper than any parser goes."""
    stream = Stream("orders")
    stream.append({"n": 0}, key="a")
    with plain_sql(), connection.cursor() as cursor:
        id = (
            "gen_random_uuid()"
            if connection.vendor == "postgresql"
            else "lower(hex(randomblob(16)))"
        )
        cursor.execute(
            "INSERT INTO echomq_record (id, stream_id, position, type, key, data, headers,"
            " idempotency_key, recorded_at)"
            f" SELECT {id}, stream_id, 1, 'odd', 'b\"', %s, headers, '', recorded_at"
            " FROM echomq_record",
            ["[" * BEYOND + "]" * BEYOND],
        )
    stream.append({"n": 2}, key="c")
    return stream


@contextlib.contextmanager
def plain_sql() -> Iterator[None]:
    """Let SQL write so deep a value: it has to insist."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SET max_stack_depth = '7MB'")
        else:
            cursor.execute("PRAGMA ignore_check_constraints = ON")
        yield
        if connection.vendor == "postgresql":
            cursor.execute("RESET max_stack_depth")
        else:
            cursor.execute("PRAGMA ignore_check_constraints = OFF")


class TestUndecodable:
    def test_a_read_says_which_and_it_can_be_skipped(self, broken: Stream) -> None:
        page = broken.read()
        assert [record.position for record in page.records] == [0] and page.cursor == 1
        with pytest.raises(
            UndecodableRecord, match="read on from its position plus one, 2"
        ) as caught:
            broken.read(page.token)
        assert (caught.value.stream, caught.value.position) == ("orders", 1)
        assert [r.data for r in broken.read(caught.value.position + 1).records] == [{"n": 2}]

    def test_with_a_filter_that_leaves_it_out_nothing_is_wrong(self, broken: Stream) -> None:
        assert [r.position for r in broken.replay(key="c")] == [2]
        page = broken.read(types=[""])
        assert [r.position for r in page.records] == [0, 2] and page.caught_up

    def test_a_token_of_another_life_is_told_first(self, broken: Stream) -> None:
        token = broken.read(limit=1).token
        broken.rotate_epoch()
        with pytest.raises(CursorInvalid):
            broken.read(token)

    def test_tail_and_replay(self, broken: Stream) -> None:
        for records in (broken.replay(), broken.tail()):
            assert next(records).position == 0
            with pytest.raises(UndecodableRecord):
                next(records)
        assert next(broken.tail(2)).data == {"n": 2}

    def test_the_admin_shows_the_list_and_the_record(
        self, broken: Stream, admin_client: Client
    ) -> None:
        assert admin_client.get("/admin/echomq/record/?stream=orders").status_code == 200
        for pk in Record.objects.values_list("pk", flat=True):
            page = admin_client.get(f"/admin/echomq/record/{pk}/change/")
            assert page.status_code == 200
        assert get_user_model().objects.exists()

    async def test_pages_get_it_as_it_is(self, settings: Settings, broken: Stream) -> None:
        use(settings, None)
        page = LiveSocket(EchoConsumer.as_asgi())
        await page.open()
        await page.subscribe("orders", start="first")
        text = str(await page.raw.receive_from(timeout=10)).replace(" ", "")
        assert '"n":0' in text and "[" * BEYOND in text and '"n":2' in text
        await page.close()
        page = LiveSocket(EchoConsumer.as_asgi())
        await page.open()
        await page.subscribe("orders", start="first", key='b"')
        assert "[" * BEYOND in await page.raw.receive_from(timeout=10)
        await page.close()

    async def test_server_sent_events_pass_it_on(self, settings: Settings, broken: Stream) -> None:
        use(settings, None)
        query: dict[str, Any] = {"from": "first"}
        async with AsgiRequest(application, "/echomq/streams/orders/events", **query) as request:
            await request.expect("subscribed")
            records = await request.records(3)
        assert [record.id.split(":")[1] for record in records] == ["1", "2", "3"]
        assert b"[" * BEYOND in request.body

    async def test_under_a_mask_it_is_left_out_and_logged(
        self, settings: Settings, broken: Stream, caplog: pytest.LogCaptureFixture
    ) -> None:
        use(settings, lambda user, stream: Everything())
        page = LiveSocket(EchoConsumer.as_asgi())
        await page.open()
        await page.subscribe("orders", start="first")
        records = await page.records(2)
        assert [record["data"] for record in records] == [{"n": 0}, {"n": 2}]
        assert page.resume == (await broken.ainfo()).token
        await page.close()
        (line,) = [r.getMessage() for r in caplog.records if "record_left_out" in r.getMessage()]
        assert "stream=orders position=1" in line

    def test_a_page_in_json(self, settings: Settings, client: Client, broken: Stream) -> None:
        use(settings, None)
        assert b"[" * BEYOND in client.get("/echomq/streams/orders").content
        use(settings, lambda user, stream: Everything())
        page = client.get("/echomq/streams/orders").json()
        assert [record["data"] for record in page["records"]] == [{"n": 0}, {"n": 2}]
        assert page["cursor"] == 3


class Everything:
    """A mask that hides nothing."""

    key = "everything"

    def __call__(self, record: StreamRecord) -> StreamRecord | None:
        return record


def use(settings: Settings, rule: Any) -> None:
    settings.ALLOWED_HOSTS = ["*"]
    settings.ROOT_URLCONF = "project.urls"
    settings.ECHOMQ = {"AUTHORIZE": lambda user, action, target: True, "MASK": rule}
