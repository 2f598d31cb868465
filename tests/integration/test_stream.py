"""The log on both databases: append, read, resume, and every explicit refusal."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from django.db import connection, transaction

from echomq_app.exceptions import (
    CursorExpired,
    CursorInvalid,
    InvalidArgument,
    InvalidName,
    InvalidPayload,
    UnknownStream,
    WrongExpectedCursor,
)
from echomq_app.models import Record, trimming
from echomq_app.stream import NewRecord, Stream, append_all

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def orders() -> Stream:
    return Stream("orders")


def filled(count: int, name: str = "orders") -> Stream:
    stream = Stream(name)
    stream.append_many([{"data": {"n": n}} for n in range(count)])
    return stream


def numbers(records: object) -> list[int]:
    return [record.data["n"] for record in records]  # type: ignore[attr-defined]


class TestAppend:
    def test_gives_dense_positions_from_0_and_a_receipt_that_resumes_after_it(
        self, orders: Stream
    ) -> None:
        first = orders.append({"n": 0}, type="placed", key="7", headers={"trace": "abc"})
        second = orders.append({"n": 1})
        assert (first.position, first.cursor, second.position, second.cursor) == (0, 1, 1, 2)
        assert str(first.id).startswith("EVT") and len(str(first.id)) == 29
        assert first.id.position == 0 and first.stream == "orders" and not first.duplicate
        page = orders.read(first.token)
        assert numbers(page.records) == [1]
        assert page.token == second.token == orders.info().token

    def test_record_comes_back_as_it_was_given(self, orders: Stream) -> None:
        data = {"text": "héllo \U0001f30b", "n": [1, 2.5, None, True, {"deep": []}], "big": 10**30}
        receipt = orders.append(data, type="t", key="k", headers={"h": [1]})
        (record,) = orders.read().records
        assert record.data == data
        assert (record.type, record.key, record.headers) == ("t", "k", {"h": [1]})
        assert (record.id, record.position, record.token) == (receipt.id, 0, receipt.token)
        assert record.recorded_at == receipt.recorded_at
        row = Record.objects.get()
        assert row.id == receipt.id and row.data == data and str(row.id) == str(receipt.id)

    @pytest.mark.parametrize("data", [None, 0, "", False, [], "text", [None]])
    def test_any_json_value_is_data(self, orders: Stream, data: object) -> None:
        orders.append(data)
        assert orders.read().records[0].data == data

    def test_many_are_consecutive_and_of_one_time(self, orders: Stream) -> None:
        receipts = orders.append_many([NewRecord(data={"n": 0}), {"data": {"n": 1}, "key": "k"}])
        assert [receipt.position for receipt in receipts] == [0, 1]
        assert receipts[0].recorded_at == receipts[1].recorded_at
        assert receipts[0].id < receipts[1].id
        assert orders.append_many([]) == []

    def test_more_than_one_call_takes_is_still_all_or_none(self, orders: Stream) -> None:
        receipts = orders.append_many([{"data": n} for n in range(11_000)])
        assert [receipt.position for receipt in receipts] == list(range(11_000))
        assert orders.info().count == 11_000

    def test_rollback_gives_the_position_back(self, orders: Stream) -> None:
        for _ in range(50):
            with transaction.atomic():
                orders.append({"n": -1})
                transaction.set_rollback(True)
        orders.append({"n": 0})
        with transaction.atomic():
            orders.append({"n": 1})
            with transaction.atomic():
                orders.append({"n": -1})
                transaction.set_rollback(True)
            orders.append({"n": 2})
        assert numbers(orders.replay()) == [0, 1, 2]
        assert [record.position for record in orders.replay()] == [0, 1, 2]

    def test_time_is_monotone_though_the_clock_is_not(self, orders: Stream) -> None:
        orders.append({"n": 0})
        ahead = dt.datetime.now(dt.UTC) + dt.timedelta(hours=1)
        rewrite("UPDATE echomq_record SET recorded_at = %s", [ahead])
        later = orders.append({"n": 1})
        assert later.recorded_at == ahead
        assert dt.timedelta(minutes=59) < orders.info().clock_ahead <= dt.timedelta(hours=1)

    def test_append_all_writes_all_or_none(self) -> None:
        receipts = append_all({"b": [{"data": 1}], "a": [{"data": 2}, {"data": 3}]})
        assert [receipt.position for receipt in receipts["a"]] == [0, 1]
        with pytest.raises(InvalidPayload):
            append_all({"a": [{"data": 4}], "b": [{"data": float("nan")}]})
        assert Stream("a").info().write_cursor == 2


class TestIdempotency:
    def test_repeat_gives_the_first_receipt_and_takes_no_position(self, orders: Stream) -> None:
        first = orders.append({"n": 0}, idempotency_key="a")
        orders.append({"n": 1})
        again = orders.append({"n": 99}, idempotency_key="a")
        assert again.duplicate and not first.duplicate
        assert (again.id, again.position, again.recorded_at) == (
            first.id,
            first.position,
            first.recorded_at,
        )
        assert numbers(orders.replay()) == [0, 1]

    def test_within_one_batch(self, orders: Stream) -> None:
        orders.append({"n": 0}, idempotency_key="old")
        receipts = orders.append_many(
            [
                {"data": {"n": 1}, "idempotency_key": "x"},
                {"data": {"n": 9}, "idempotency_key": "old"},
                {"data": {"n": 2}},
                {"data": {"n": 9}, "idempotency_key": "x"},
                {"data": {"n": 3}, "idempotency_key": "y"},
            ]
        )
        assert [r.position for r in receipts] == [1, 0, 2, 1, 3]
        assert [r.duplicate for r in receipts] == [False, True, False, True, False]
        assert numbers(orders.replay()) == [0, 1, 2, 3]

    def test_is_decided_before_the_expected_cursor(self, orders: Stream) -> None:
        orders.append({"n": 0}, idempotency_key="a", expected_cursor=0)
        assert orders.append({"n": 0}, idempotency_key="a", expected_cursor=0).duplicate
        with pytest.raises(WrongExpectedCursor) as caught:
            orders.append({"n": 1}, idempotency_key="b", expected_cursor=0)
        assert caught.value.write_cursor == 1

    def test_keys_of_different_streams_are_different(self) -> None:
        assert not Stream("a").append(1, idempotency_key="k").duplicate
        assert not Stream("b").append(1, idempotency_key="k").duplicate


class TestExpectedCursor:
    def test_conflict_writes_nothing_and_leaves_the_transaction_usable(
        self, orders: Stream
    ) -> None:
        orders.append({"n": 0}, expected_cursor=0)
        with transaction.atomic():
            with pytest.raises(WrongExpectedCursor, match="Nothing was written"):
                orders.append_many([{"data": {"n": 9}}] * 3, expected_cursor=0)
            orders.append({"n": 1}, expected_cursor=1)
        assert numbers(orders.replay()) == [0, 1]

    def test_conflict_makes_no_stream(self) -> None:
        stream = Stream("unwritten")
        with pytest.raises(WrongExpectedCursor, match="is at cursor 0, not at the expected 5"):
            stream.append({"n": 0}, expected_cursor=5, idempotency_key="a")
        with pytest.raises(UnknownStream):
            stream.info()
        assert stream.append({"n": 0}, expected_cursor=0).position == 0

    @pytest.mark.parametrize("wrong", [-1, "1", True, 1.0])
    def test_is_a_count(self, orders: Stream, wrong: object) -> None:
        with pytest.raises(InvalidArgument):
            orders.append({"n": 0}, expected_cursor=wrong)  # type: ignore[arg-type]


class TestRead:
    @pytest.mark.parametrize(
        ("count", "limit", "pages"),
        [(101, 100, [100, 1, 0]), (100, 100, [100, 0]), (1, 100, [1, 0])],
    )
    def test_page_sizes(self, count: int, limit: int, pages: list[int]) -> None:
        stream, cursor, sizes = filled(count), 0, []
        for _ in pages:
            page = stream.read(cursor, limit=limit)
            sizes.append(len(page.records))
            cursor = page.cursor
        assert sizes == pages
        assert page.caught_up and cursor == count == page.write_cursor

    def test_resume_at_0_with_a_single_record(self) -> None:
        stream = filled(1)
        assert numbers(stream.read(0).records) == [0]
        assert numbers(stream.read(None).records) == [0]
        assert stream.read(1).records == []

    def test_token_of_an_empty_stream_misses_nothing(self) -> None:
        stream = Stream("new")
        stream.set_retention()
        page = stream.read()
        assert page.cursor == 0 and page.token == f"{page.epoch}:0:"
        stream.append({"n": 0})
        assert numbers(stream.read(page.token).records) == [0]

    def test_live_only_reader_that_received_nothing(self) -> None:
        stream = filled(5)
        head = stream.info().token
        assert stream.read(head).records == []
        stream.append({"n": 5})
        assert numbers(stream.read(head).records) == [5]

    def test_types_and_keys(self) -> None:
        stream = Stream("orders")
        stream.append_many(
            [{"data": {"n": n}, "type": "ab"[n % 2], "key": f"k{n % 3}"} for n in range(12)]
        )
        assert numbers(stream.read(types=["a"]).records) == [0, 2, 4, 6, 8, 10]
        assert numbers(stream.read(key="k1").records) == [1, 4, 7, 10]
        assert numbers(stream.read(types=["b"], key="k1").records) == [1, 7]
        page = stream.read(types=["a"], limit=2)
        assert page.cursor == 3 and numbers(stream.read(page.token, types=["a"]).records)[0] == 4
        assert stream.read(types=[]).cursor == 12
        assert stream.read(key="").records == []

    def test_filter_that_matches_nothing_still_advances(self, settings: object) -> None:
        settings.ECHOMQ = {"FILTER_WINDOW": 10}  # type: ignore[attr-defined]
        stream = filled(25)
        page = stream.read(types=["none"], limit=5)
        assert (page.records, page.cursor) == ([], 10)
        page = stream.read(page.token, types=["none"], limit=5)
        page = stream.read(page.token, types=["none"], limit=5)
        assert page.cursor == 25 == page.write_cursor and page.caught_up
        stream.append({"n": 25}, type="none")
        assert numbers(stream.read(page.token, types=["none"]).records) == [25]

    @pytest.mark.parametrize("limit", [0, -1, 10_001, True, "5"])
    def test_limit_out_of_range(self, limit: object) -> None:
        with pytest.raises(InvalidArgument):
            filled(1).read(limit=limit)  # type: ignore[arg-type]

    def test_unknown_stream(self) -> None:
        for call in (Stream("no").read, Stream("no").info, Stream("no").trim, Stream("no").delete):
            with pytest.raises(UnknownStream, match="no stream 'no'"):
                call()

    def test_window_and_cursor_at(self) -> None:
        stream = Stream("orders")
        start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
        stream.append_many([{"data": {"n": n}} for n in range(10)])
        for n in range(10):
            rewrite(
                "UPDATE echomq_record SET recorded_at = %s WHERE position = %s",
                [start + dt.timedelta(minutes=n // 2), n],
            )
        assert stream.cursor_at(start) == 0
        assert stream.cursor_at(start + dt.timedelta(minutes=2)) == 4
        assert stream.cursor_at(start + dt.timedelta(days=1)) == 10
        span = stream.window(start + dt.timedelta(minutes=1), start + dt.timedelta(minutes=3))
        assert numbers(span) == [2, 3, 4, 5]
        with pytest.raises(InvalidArgument, match="aware"):
            stream.cursor_at(dt.datetime(2026, 1, 1))  # noqa: DTZ001


class TestExplicitRefusals:
    def test_expired_ahead_epoch_malformed_are_four_answers(self) -> None:
        stream = filled(10)
        old = stream.read(limit=3)
        stream.trim(max_records=5)
        with pytest.raises(CursorExpired) as expired:
            stream.read(old.token)
        assert (expired.value.requested, expired.value.missed) == (3, 2)
        assert (expired.value.first_position, expired.value.write_cursor) == (5, 10)
        assert numbers(stream.read(5).records) == [5, 6, 7, 8, 9]
        assert reason(stream, 11) == "ahead"
        assert reason(stream, "garbage") == reason(stream, -1) == reason(stream, "") == "malformed"
        head = stream.info().token
        stream.rotate_epoch()
        assert reason(stream, head) == "epoch"

    def test_recreated_stream_refuses_old_tokens(self) -> None:
        stream = filled(3)
        tokens = [f"{stream.info().epoch}:0:", stream.read(limit=1).token, stream.info().token]
        stream.delete()
        with pytest.raises(UnknownStream):
            stream.read(tokens[0])
        filled(5)
        assert [reason(stream, token) for token in tokens] == ["epoch"] * 3

    def test_history_that_diverged_under_the_same_epoch(self) -> None:
        stream = filled(3)
        token = stream.info().token
        with_other_tail = Record.objects.get(position=2).id.int ^ 1
        rewrite(
            "UPDATE echomq_record SET id = %s WHERE position = 2",
            [f"{with_other_tail:032x}"],
        )
        assert reason(stream, token) == "diverged"
        assert numbers(stream.read(3).records) == []

    def test_restored_backup(self) -> None:
        """Cursor above the write cursor; then the log grows past it with other records."""
        stream = filled(5)
        token = stream.info().token
        rewrite("DELETE FROM echomq_record WHERE position >= 3", [])
        assert reason(stream, token) == "ahead"
        stream.append_many([{"data": {"n": 9}}] * 4)
        assert reason(stream, token) == "diverged"


class TestTrim:
    def test_by_count_age_position_and_dry_run(self) -> None:
        stream = filled(10)
        assert stream.trim(max_records=4, dry_run=True).trimmed == 6
        assert stream.info().first_position == 0
        result = stream.trim(before=3)
        assert (result.first_position, result.trimmed) == (3, 3)
        assert stream.trim(max_age=dt.timedelta(hours=1)).trimmed == 0
        assert stream.trim(max_age=dt.timedelta(0)).trimmed == 7
        info = stream.info()
        assert (info.first_position, info.write_cursor, info.count) == (10, 10, 0)
        assert Record.objects.count() == 0
        assert stream.append({"n": 10}).position == 10
        assert stream.read(10).records[0].position == 10

    def test_before_the_head_only(self) -> None:
        stream = filled(3)
        assert stream.trim(before=99).first_position == 3
        assert stream.trim(before=1).trimmed == 0

    def test_interrupted_trim_is_finished_by_the_next(self) -> None:
        stream = filled(10)
        trimming.move_first_position("default", stream.name, 6, epoch=stream.info().epoch)
        with pytest.raises(CursorExpired):
            stream.read(5)
        assert numbers(stream.read().records) == [6, 7, 8, 9]
        stream.trim(before=6)
        assert Record.objects.count() == 4

    def test_retention_policies(self, settings: object) -> None:
        settings.ECHOMQ = {"RETENTION": {"ord*": {"max_records": 5}}}  # type: ignore[attr-defined]
        stream = filled(10)
        assert stream.trim().first_position == 5
        stream.set_retention(max_records=2)
        assert stream.trim().first_position == 8
        assert stream.info().max_records == 2


class TestBadInput:
    @pytest.mark.parametrize("name", ["", "a b", "a:b", "é", "x" * 76, "a/b", "a\n", None, 5])
    def test_names(self, name: object) -> None:
        with pytest.raises(InvalidName):
            Stream(name)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["emq.mail", "orders.dead"])
    def test_reserved_names_are_read_but_not_written(self, name: str) -> None:
        with pytest.raises(InvalidName, match="reserved"):
            Stream(name).append({})
        with pytest.raises(InvalidName, match="reserved"):
            Stream(name).append_on_commit({})

    @pytest.mark.parametrize(
        "data",
        [
            {"a": "nul\0"},
            {"a": float("nan")},
            [float("-inf")],
            {"a": "\ud800"},
            {1: "key"},
            {"k\0": 1},
            {"a": object()},
            b"bytes",
            dt.datetime.now(dt.UTC),
        ],
    )
    def test_payloads(self, orders: Stream, data: object) -> None:
        with pytest.raises(InvalidPayload):
            orders.append(data)
        with pytest.raises(InvalidPayload):
            orders.append({}, headers={"h": data})
        with pytest.raises(InvalidPayload):
            orders.append_on_commit(data)
        with pytest.raises(UnknownStream):
            orders.read()

    def test_too_large(self, orders: Stream, settings: object) -> None:
        with pytest.raises(InvalidPayload, match="MAX_RECORD_BYTES"):
            orders.append("x" * 20_000_000)
        settings.ECHOMQ = {"MAX_RECORD_BYTES": 30_000_000}  # type: ignore[attr-defined]
        orders.append("x" * 20_000_000)
        assert len(orders.read().records[0].data) == 20_000_000

    @pytest.mark.parametrize(
        "record", [{}, {"daat": 1}, {"data": 1, "id": 2}, 5, "text", [1], None]
    )
    def test_records_of_another_shape(self, orders: Stream, record: object) -> None:
        with pytest.raises(InvalidPayload):
            orders.append_many([record])  # type: ignore[list-item]

    @pytest.mark.parametrize("field", ["type", "key", "idempotency_key"])
    @pytest.mark.parametrize("text", ["x" * 300, "nul\0", "\ud800", 5, None])
    def test_texts(self, orders: Stream, field: str, text: object) -> None:
        with pytest.raises((InvalidName, InvalidPayload)):
            orders.append({}, **{field: text})  # type: ignore[arg-type]


def reason(stream: Stream, cursor: int | str) -> str:
    with pytest.raises(CursorInvalid) as caught:
        stream.read(cursor)
    return caught.value.reason


def rewrite(sql: str, parameters: list[Any]) -> None:
    """Change history behind the log's back: with its triggers dropped."""
    from echomq_app.models import sql as objects

    with connection.cursor() as cursor:
        objects.remove(connection)
        if connection.vendor == "sqlite":
            parameters = [
                str(value.replace(tzinfo=None)) if isinstance(value, dt.datetime) else value
                for value in parameters
            ]
        cursor.execute(sql, parameters)
    objects.install(connection)
