"""What pages are sent is made by the database; it says the same as the record that is read."""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec
import pytest
from django.db import connection
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echomq_app.core.frames import WireRecord
from echomq_app.core.payload import decode
from echomq_app.core.records import StoredRecord
from echomq_app.models import paging
from echomq_app.stream import Stream

pytestmark = pytest.mark.django_db

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
records = st.fixed_dictionaries(
    {"data": values, "type": texts, "key": texts, "headers": st.dictionaries(texts, values)}
)


def stored(name: str, cursor: int = 0, **options: Any) -> list[StoredRecord]:
    options = {"limit": 100, "window": 1_000, **options}
    return paging.read_stored_page("default", name, cursor, StoredRecord, **options).records


def said(record: StoredRecord) -> dict[str, Any]:
    """Return what a page reads, in the forms of a `StreamRecord`."""
    wire = msgspec.json.decode(record.raw, type=WireRecord)
    return {
        "id": wire.id,
        "position": wire.position,
        "type": wire.type,
        "key": wire.key,
        "data": decode(bytes(wire.data)),
        "headers": decode(bytes(wire.headers)),
        "recorded_at": dt.datetime.fromisoformat(wire.recorded_at),
    }


def read(name: str) -> list[dict[str, Any]]:
    return [
        {**{field: getattr(record, field) for field in WireRecord.__struct_fields__}}
        | {"id": str(record.id)}
        for record in Stream(name).read().records
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(records, min_size=1, max_size=4))
def test_any_record(new: list[dict[str, Any]]) -> None:
    Stream("orders").append_many(new)
    try:
        assert [said(record) for record in stored("orders")] == read("orders")
    finally:
        Stream("orders").delete()


@pytest.mark.postgres
@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/St_Johns"])
def test_times_are_in_utc_whatever_the_session(zone: str) -> None:
    receipt = Stream("orders").append(1)
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL TIME ZONE '{zone}'")
    (record,) = stored("orders")
    assert said(record)["recorded_at"] == receipt.recorded_at
    assert msgspec.json.decode(record.raw)["recorded_at"].endswith("+00:00")


def test_in_order_with_the_head_of_the_stream_once() -> None:
    receipts = Stream("orders").append_many([{"data": n, "type": f"t{n % 3}"} for n in range(50)])
    snapshot = paging.read_stored_page(
        "default", "orders", 7, StoredRecord, limit=20, window=40, types=["t1"]
    )
    assert [record.position for record in snapshot.records] == list(range(7, 47, 3))
    assert (snapshot.place.first_position, snapshot.place.write_cursor) == (0, 50)
    assert (snapshot.end_cursor, snapshot.end_tail) == (47, receipts[46].id.tail)
    assert [(record.bits, record.tail) for record in snapshot.records[:2]] == [
        (receipt.id.int, receipt.id.tail) for receipt in (receipts[7], receipts[10])
    ]
