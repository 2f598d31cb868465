"""Times come back as they were, whatever the project's time zone is."""

from __future__ import annotations

import datetime as dt

import pytest
from django.db import connection
from django.test import override_settings

from echomq_app.stream import Stream

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

# In Berlin the clock shows half past two twice this night; this is the second time.
SECOND_HALF_PAST_TWO = dt.datetime(2026, 10, 25, 1, 30, 0, 123400, tzinfo=dt.UTC)


@pytest.mark.parametrize("use_tz", [True, False])
def test_an_hour_that_comes_twice_is_read_as_the_right_one(use_tz: bool) -> None:
    with override_settings(USE_TZ=use_tz, TIME_ZONE="Europe/Berlin"):
        stream = Stream("clocks")
        stream.set_retention()  # makes it
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO echomq_record (id, stream_id, position, type, key, data, headers,"
                " idempotency_key, recorded_at)"
                " SELECT echomq_event_id_v1(0, 0), id, 0, '', '', '1', '{}', '', %s"
                " FROM echomq_stream",
                (SECOND_HALF_PAST_TWO.isoformat(),),
            )
        (record,) = stream.read().records
        assert record.recorded_at == SECOND_HALF_PAST_TWO
        assert stream.info().newest_at == SECOND_HALF_PAST_TWO
        assert stream.cursor_at(SECOND_HALF_PAST_TWO) == 0
        assert stream.cursor_at(SECOND_HALF_PAST_TWO + dt.timedelta(microseconds=1)) == 1


@pytest.mark.parametrize("use_tz", [True, False])
def test_a_receipt_has_the_time_of_its_record(use_tz: bool) -> None:
    with override_settings(USE_TZ=use_tz, TIME_ZONE="Asia/Kathmandu"):
        before = dt.datetime.now(dt.UTC)
        receipt = Stream("clocks").append(1)
        assert receipt.recorded_at == Stream("clocks").read().records[0].recorded_at
        assert before <= receipt.recorded_at <= dt.datetime.now(dt.UTC)
