"""Retention in the background: what `apply_retention` removes, and what it leaves alone."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connection
from pytest_django.fixtures import Settings

from echomq_app.core.names import queue_stream
from echomq_app.exceptions import CursorExpired, UnknownStream
from echomq_app.models import Record, appending, sql, trimming
from echomq_app.stream import Stream

pytestmark = pytest.mark.django_db(transaction=True)


def filled(name: str, count: int = 10) -> Stream:
    stream = Stream(name)
    stream.append_many([{"data": n} for n in range(count)])
    return stream


def age_records(stream: Stream, below: int, by: dt.timedelta) -> None:
    """Make the first records old, behind the back of the trigger that forbids it."""
    rows = Record.objects.filter(stream__name=stream.name, position__lt=below)
    trigger = "echomq_record_no_update_v1"
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"ALTER TABLE echomq_record DISABLE TRIGGER {trigger}")
            rows.update(recorded_at=dt.datetime.now(dt.UTC) - by)
            cursor.execute(f"ALTER TABLE echomq_record ENABLE TRIGGER {trigger}")
        else:
            sql.remove(connection)
            rows.update(recorded_at=dt.datetime.now(dt.UTC) - by)
            sql.install(connection)


def test_each_stream_is_trimmed_to_its_own_policy_or_the_settings(settings: Settings) -> None:
    settings.ECHOMQ = {"RETENTION": {"logs.*": {"max_records": 3}}}
    own, by_pattern, kept = filled("own"), filled("logs.web"), filled("kept")
    own.set_retention(max_records=4)
    results = trimming.apply_retention("default")
    assert [(r.stream, r.first_position, r.trimmed, r.dry_run) for r in results] == [
        ("logs.web", 7, 7, False),
        ("own", 6, 6, False),
    ]
    assert [r.data for r in own.read().records] == [6, 7, 8, 9]
    assert [r.data for r in by_pattern.read().records] == [7, 8, 9]
    assert kept.info().count == 10
    with pytest.raises(CursorExpired):
        own.read(0)
    assert Record.objects.filter(stream__name="own").count() == 4
    assert trimming.apply_retention("default") == []


def test_age(settings: Settings) -> None:
    settings.ECHOMQ = {"RETENTION": {"*": {"max_age": 3600}}}
    stream, young = filled("old"), filled("young")
    age_records(stream, below=6, by=dt.timedelta(hours=2))
    (result,) = trimming.apply_retention("default")
    assert (result.stream, result.first_position, result.trimmed) == ("old", 6, 6)
    assert stream.info().count == 4 and young.info().count == 10


def test_queue_streams_keep_a_week_by_default() -> None:
    name = queue_stream("emails")
    appending.append("default", name, [b'{"data":1}'] * 10)
    stream = Stream(name)
    age_records(stream, below=3, by=dt.timedelta(days=6))
    assert trimming.apply_retention("default") == []
    age_records(stream, below=3, by=dt.timedelta(days=8))
    (result,) = trimming.apply_retention("default")
    assert (result.first_position, result.trimmed) == (3, 3)


def test_dry_run_changes_nothing() -> None:
    stream = filled("orders")
    stream.set_retention(max_records=2)
    (result,) = trimming.apply_retention("default", dry_run=True)
    assert (result.first_position, result.trimmed, result.dry_run) == (8, 8, True)
    assert stream.info().count == 10


def test_finishes_a_trim_that_was_killed_after_it_moved_the_first_position() -> None:
    stream = filled("orders")
    trimming.move_first_position("default", "orders", 5, epoch=stream.info().epoch)
    assert Record.objects.count() == 10
    assert trimming.apply_retention("default") == []
    assert Record.objects.count() == 5
    assert stream.info().first_position == 5


def test_a_stream_deleted_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        stream = filled(name)
        age_records(stream, below=5, by=dt.timedelta(days=2))
        stream.set_retention(max_age=dt.timedelta(days=1))
    whole = trimming.cursor_at

    def delete_then_look(using: str, name: str, at: dt.datetime) -> int:
        if name == "a":
            Stream("a").delete()
        return whole(using, name, at)

    monkeypatch.setattr(trimming, "cursor_at", delete_then_look)
    assert [result.stream for result in trimming.apply_retention("default")] == ["b"]
    with pytest.raises(UnknownStream):
        Stream("a").info()


@pytest.mark.parametrize("by", ["trim", "retention", "delete"])
def test_a_stream_made_anew_meanwhile_keeps_its_records(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was decided about positions of one life says nothing about the next one's."""
    stream = filled("orders", 100)
    stream.set_retention(max_records=10)
    move = trimming.move_first_position

    def after_another_life_began(*args: Any, **more: Any) -> bool:
        monkeypatch.setattr(trimming, "move_first_position", move)
        stream.delete()
        stream.append("new")
        if by == "delete":  # killed right after this
            assert not move(*args, **more)
            raise KeyboardInterrupt
        return move(*args, **more)

    monkeypatch.setattr(trimming, "move_first_position", after_another_life_began)
    if by == "trim":
        assert stream.trim(max_records=10).trimmed == 0
    elif by == "retention":
        assert trimming.apply_retention("default") == []
    else:
        with pytest.raises(KeyboardInterrupt):
            stream.delete()
    assert [record.data for record in stream.read().records] == ["new"]
    assert stream.info().first_position == 0


def test_streams_with_nothing_to_trim_cost_one_statement(
    django_assert_num_queries: Callable[..., Any], settings: Settings
) -> None:
    settings.ECHOMQ = {"RETENTION": {"*": {"max_records": 100, "max_age": 3600}}}
    for number in range(5):
        filled(f"s{number}")
    with django_assert_num_queries(1):
        assert trimming.apply_retention("default") == []
