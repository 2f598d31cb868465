"""Numbers no column holds, limits nobody meant, and projects with local times."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from echomq_app.exceptions import (
    CursorInvalid,
    InvalidArgument,
    InvalidName,
    InvalidPayload,
    WrongExpectedCursor,
)
from echomq_app.models import Record
from echomq_app.stream import Stream

pytestmark = pytest.mark.django_db(transaction=True)


def filled(count: int) -> Stream:
    stream = Stream("orders")
    stream.append_many([{"data": {"n": n}} for n in range(count)])
    return stream


class TestTimeZones:
    @pytest.fixture(params=[False, True])
    def new_york(self, request: pytest.FixtureRequest, settings: Any) -> None:
        settings.USE_TZ = request.param
        settings.TIME_ZONE = "America/New_York"

    @pytest.mark.usefixtures("new_york")
    def test_times_are_aware_and_right(self, settings: Any) -> None:
        before = dt.datetime.now(dt.UTC)
        stream = Stream("orders")
        receipts = [stream.append({"n": n}) for n in range(3)]
        after = dt.datetime.now(dt.UTC)
        records = stream.read().records
        assert [record.recorded_at for record in records] == [r.recorded_at for r in receipts]
        assert before <= records[0].recorded_at <= records[2].recorded_at <= after
        info = stream.info()
        assert (info.oldest_at, info.newest_at) == (
            receipts[0].recorded_at,
            receipts[2].recorded_at,
        )
        assert before - dt.timedelta(seconds=1) <= info.created_at <= after
        assert stream.cursor_at(before) == 0
        assert stream.cursor_at(receipts[1].recorded_at) in (0, 1)
        assert stream.cursor_at(after + dt.timedelta(seconds=1)) == 3
        assert stream.trim(max_age=dt.timedelta(hours=1)).trimmed == 0
        assert stream.append({}, idempotency_key="a").recorded_at >= receipts[2].recorded_at
        row = Record.objects.get(position=0)
        assert (row.recorded_at.tzinfo is not None) == settings.USE_TZ


@pytest.mark.parametrize(
    "filters",
    [
        {"key": "a\0"},
        {"key": "\ud800"},
        {"key": 7},
        {"key": "k" * 256},
        {"types": ["ok", "a\0"]},
        {"types": ["\ud800"]},
        {"types": [7]},
    ],
)
def test_a_filter_that_no_record_can_match_is_named(filters: dict[str, Any]) -> None:
    stream = filled(1)
    for verb in (stream.read, lambda **given: next(stream.tail(**given))):
        with pytest.raises((InvalidName, InvalidPayload)):
            verb(**filters)


class TestNumbersOutOfRange:
    """A position has 42 bits. What lies beyond is refused like any other, whatever its size."""

    @pytest.mark.parametrize("beyond", [2**42, 2**63, 2**70, 10**400])
    def test_beyond(self, beyond: int) -> None:
        stream = filled(3)
        with pytest.raises(CursorInvalid) as caught:
            stream.read(beyond)
        assert (caught.value.reason, caught.value.requested) == ("ahead", beyond)
        with pytest.raises(CursorInvalid):
            stream.read(beyond, types=["a"])
        with pytest.raises(WrongExpectedCursor) as conflict:
            stream.append({}, expected_cursor=beyond)
        assert conflict.value.expected == beyond
        assert stream.trim(before=beyond, dry_run=True).trimmed == 3

    @pytest.mark.parametrize(
        "limits",
        [
            {"max_records": -1},
            {"max_records": "5"},
            {"max_age": dt.timedelta(seconds=-1)},
            {"max_records": 2**63},
            {"max_age": 5},
            {"max_age": dt.timedelta.max},
            {"before": -1},
            {"before": dt.datetime(2026, 1, 1)},  # noqa: DTZ001
            {"before": "1"},
        ],
    )
    def test_limits_that_would_remove_what_nobody_meant(self, limits: dict[str, Any]) -> None:
        stream = filled(3)
        with pytest.raises(InvalidArgument):
            stream.trim(**limits)
        if "before" not in limits:
            with pytest.raises(InvalidArgument):
                stream.set_retention(**limits)
        assert stream.info().count == 3
