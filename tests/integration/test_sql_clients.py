"""The functions in the database, called by other programs and by triggers."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction

from echomq_app.models import Outbox, Record
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Stream

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]


def append(stream: str, records: str) -> list[tuple[object, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT n, position, duplicate FROM echomq_append_v1(%s, %s::jsonb)",
            [stream, records],
        )
        return list(cursor.fetchall())


def test_append_and_repeat() -> None:
    first = append("orders", '[{"data": 1, "idempotency_key": "a"}, {"data": null}]')
    again = append("orders", '[{"data": 3}, {"data": 1, "idempotency_key": "a"}]')
    assert first == [(1, 0, False), (2, 1, False)]
    assert again == [(1, 2, False), (2, 0, True)]
    records = list(Stream("orders").replay())
    assert [(r.data, r.type, r.headers) for r in records] == [
        (1, "", {}),
        (None, "", {}),
        (3, "", {}),
    ]


def test_a_trigger_of_the_users_appends() -> None:
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE t (id integer)")
        cursor.execute(
            "CREATE FUNCTION told() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
            " PERFORM echomq_append_on_commit_v1('t', jsonb_build_array("
            " jsonb_build_object('data', to_jsonb(NEW)))); RETURN NULL; END $$"
        )
        cursor.execute("CREATE TRIGGER told AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION told()")
        try:
            cursor.execute("INSERT INTO t SELECT generate_series(1, 3)")
        finally:
            cursor.execute("DROP TABLE t")
            cursor.execute("DROP FUNCTION told")
    assert [record.data["id"] for record in Stream("t").replay()] == [1, 2, 3]


@pytest.mark.parametrize("name", ["", "a b", "x" * 76, "é", "a\nb"])
def test_bad_names_are_refused(name: str) -> None:
    for function in ("echomq_append_v1", "echomq_append_on_commit_v1"):
        with pytest.raises(DatabaseError, match="can't be called"):
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT {function}(%s, '[{{\"data\": 1}}]')", [name])
    assert not StreamRow.objects.exists()


@pytest.mark.parametrize(
    "records", ["{}", "5", '[{"daat": 1}]', "[5]", '[{"data": 1, "type": "%s"}]' % ("x" * 101)]
)
def test_bad_records_are_refused_and_nothing_is_written(records: str) -> None:
    with pytest.raises((DatabaseError, IntegrityError)):
        append("orders", records)
    assert not Record.objects.exists()
    # On commit, too, at the latest in the commit: not when the relay comes by.
    with pytest.raises((DatabaseError, IntegrityError)), connection.cursor() as cursor:
        cursor.execute("SELECT echomq_append_on_commit_v1('orders', %s::jsonb)", [records])
    assert not Record.objects.exists() and not Outbox.objects.exists()


@pytest.mark.parametrize("stream", ["orders", "emq.mail"])
@pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE"])
@pytest.mark.parametrize("record", ["5", '{"daat": 1}', '{"data": 1, "key": "%s"}' % ("x" * 256)])
def test_none_of_them_waits_for_the_relay_for_ever(stream: str, level: str, record: str) -> None:
    @transaction.atomic
    def append(records: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            cursor.execute("SELECT echomq_append_on_commit_v1(%s, %s::jsonb)", [stream, records])

    with pytest.raises(DatabaseError):
        append(f'[{{"data": 0}}, {record}]')
    assert not Outbox.objects.exists()
    append('[{"data": 0, "type": null}]')
    Stream(stream).relay()
    assert [record.data for record in Stream(stream).replay()] == [0]


def test_headers_that_are_null_are_no_headers() -> None:
    append("orders", '[{"data": 1, "headers": null, "type": null, "key": null}]')
    (record,) = Stream("orders").read().records
    assert (record.headers, record.type, record.key) == ({}, "", "")
