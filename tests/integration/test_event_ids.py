"""EVT ids are built in SQL on PostgreSQL, in Python on SQLite: the same ids."""

from __future__ import annotations

import datetime as dt
import uuid

import pytest
from django.db import connection

from echomq_app.core.ids import MAX_POSITION, EventId, event_id
from echomq_app.stream import Stream

pytestmark = pytest.mark.django_db(transaction=True)

POSITIONS = (0, 1, (1 << 30) - 1, 1 << 30, (1 << 30) + 1, (1 << 41) + 12345, MAX_POSITION)


@pytest.mark.postgres
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("milliseconds", [0, 1_517_363_399_650, (1 << 47) - 1])
def test_sql_builds_what_python_builds(position: int, milliseconds: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT echomq_event_id_v1(%s, %s)", (milliseconds, position))
        (built,) = cursor.fetchone()
    tail = built.int & 0xFFFFFFFF
    assert built == event_id(milliseconds, position, tail)
    assert (built.version, built.variant) == (7, uuid.RFC_4122)
    assert EventId.from_uuid(built).position == position


@pytest.mark.postgres
def test_last_32_bits_are_random_over_their_whole_range() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT echomq_event_id_v1(0, n) FROM generate_series(1, 2000) AS n")
        tails = [id.int & 0xFFFFFFFF for (id,) in cursor.fetchall()]
    assert len(set(tails)) > 1_990
    assert min(tails) < 1 << 28 and max(tails) > (1 << 32) - (1 << 28)


def test_id_holds_the_time_and_the_position_of_its_record() -> None:
    stream = Stream("orders")
    receipts = stream.append_many([{"data": n} for n in range(3)])
    for receipt in receipts:
        since_1970 = receipt.recorded_at - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
        assert receipt.id.int >> 80 == since_1970 // dt.timedelta(milliseconds=1)
        assert receipt.id.position == receipt.position
    assert [record.id for record in stream.read().records] == [one.id for one in receipts]
