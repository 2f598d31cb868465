"""Functions and triggers in the database: where they are, what they refuse, who may call them."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from django.core.management import call_command
from django.core.management.color import no_style
from django.db import ProgrammingError, connection, connections
from django.db.utils import DatabaseError
from psycopg import sql as psql

from echomq_app.exceptions import CursorInvalid
from echomq_app.models import Outbox, Record, sql
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Stream
from tests.databases import database_alias, empty_database, session

pytestmark = pytest.mark.django_db(transaction=True)

WEIRD = 'We"ird {Schema} 100% $$ s'


class TestAppendOnly:
    def test_a_record_is_never_changed(self) -> None:
        Stream("orders").append({"n": 0})
        for change in ("type = 'x'", "data = '1'", "position = 5", "headers = '[0]'"):
            with pytest.raises(DatabaseError, match="append-only"), connection.cursor() as cursor:
                cursor.execute(f"UPDATE echomq_record SET {change}")
        with pytest.raises(DatabaseError, match="append-only"):
            Record.objects.update(key="x")
        record = Record.objects.get()
        record.recorded_at += dt.timedelta(seconds=1)
        with pytest.raises(DatabaseError, match="append-only"):
            record.save()
        assert Stream("orders").read().records[0].data == {"n": 0}

    @pytest.mark.parametrize("data", [{"n": 0, "é": ["ü", None, 1.5]}, {}, [], None, "é", 10**30])
    def test_the_same_record_over_itself_is_passed_over(self, data: object) -> None:
        Stream("orders").append(data, headers={"é": 1}, type="t", key="k")
        before = Stream("orders").read().records
        record = Record.objects.get()
        record.recorded_at = record.recorded_at.replace(
            microsecond=record.recorded_at.microsecond // 1000 * 1000
        )
        record.save()
        assert Stream("orders").read().records == before

    @pytest.mark.parametrize(
        ("data", "other"),
        [
            ({"a": {}, "b": 1}, {"a": {"b": 1}}),
            ({"a": 1}, {"a": "1"}),
            ([1, [2]], [1, 2]),
            ([], {}),
            (None, [None]),
            ("null", None),
            (True, 1),
        ],
    )
    def test_other_data_is_not_the_same_record(self, data: object, other: object) -> None:
        Stream("orders").append(data)
        record = Record.objects.get()
        for changed in ("data", "headers"):
            setattr(record, changed, other)
            with pytest.raises(DatabaseError, match="append-only"):
                record.save()
        assert Stream("orders").read().records[0].data == data

    @pytest.mark.postgres
    def test_a_retained_record_is_never_deleted(self) -> None:
        stream = Stream("orders")
        stream.append_many([{"data": n} for n in range(10)])
        stream.trim(before=5)
        with pytest.raises(DatabaseError, match=r"append-only.*deleted") as caught:
            Record.objects.filter(position=7).delete()
        assert "trim" in str(caught.value)
        with pytest.raises(DatabaseError, match="append-only"):
            Record.objects.all().delete()
        with connection.cursor() as cursor:
            cursor.execute("UPDATE echomq_stream SET first_position = 8")
            cursor.execute("DELETE FROM echomq_record WHERE position < 8")
        assert [record.position for record in stream.replay()] == [8, 9]

    @pytest.mark.postgres
    def test_a_stream_is_not_lost_while_its_records_are_kept(self) -> None:
        Stream("orders").append({})
        with pytest.raises(DatabaseError, match="still has records"):
            StreamRow.objects.get().delete()
        Stream("orders").delete()
        assert not StreamRow.objects.exists() and not Record.objects.exists()

    @pytest.mark.sqlite
    def test_a_stream_that_was_lost_on_sqlite_begins_another_life(self) -> None:
        """SQLite can't guard the row. Old places are refused, positions not used again."""
        stream = Stream("orders")
        token = stream.append_many([{"data": n} for n in range(3)])[-1].token
        StreamRow.objects.get().delete()
        assert stream.append("new").position == 0
        assert [record.data for record in stream.replay()] == ["new"]
        with pytest.raises(CursorInvalid) as caught:
            stream.read(token)
        assert caught.value.reason == "epoch"


class TestInstallation:
    def test_twice_changes_nothing(self) -> None:
        Stream("orders").append({})
        assert sql.missing(connection) == []
        sql.install(connection)
        assert sql.missing(connection) == []
        assert Stream("orders").append({}).position == 1

    def test_missing_ones_are_named_and_come_back_with_migrate(self) -> None:
        everything = set(sql.TRIGGERS[connection.vendor])
        sql.remove(connection)
        sql.remove(connection)
        missing = sql.missing(connection)
        if connection.vendor == "postgresql":
            assert set(sql.FUNCTIONS) < set(missing)
            assert {f"trigger {name}" for name in everything} < set(missing)
        else:
            assert set(missing) == everything
        call_command("migrate", "echomq", verbosity=0)
        assert sql.missing(connection) == []

    @pytest.mark.postgres
    def test_a_missing_trigger_alone_is_noticed(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute("DROP TRIGGER echomq_outbox_commit_v1 ON echomq_outbox")
        assert sql.missing(connection) == ["trigger echomq_outbox_commit_v1"]
        call_command("migrate", "echomq", verbosity=0)
        assert sql.missing(connection) == []


@pytest.fixture
def tenant(tmp_path: Path) -> Iterator[str]:
    """Give an alias whose search_path is one schema with an odd name, migrated."""
    with in_schema("tenant", WEIRD) as alias:
        call_command("migrate", "echomq", database=alias, verbosity=0)
        yield alias


@contextlib.contextmanager
def in_schema(alias: str, *schemas: str) -> Iterator[str]:
    """Give an alias whose search_path is these schemas; the first is made, and dropped after."""
    (first, *_) = schemas
    quoted = ", ".join('"' + name.replace('"', '""') + '"' for name in schemas)
    option = quoted.replace("\\", "\\\\").replace(" ", "\\ ")
    with session() as admin:
        admin.execute(psql.SQL("CREATE SCHEMA {}").format(psql.Identifier(first)))
        try:
            with database_alias(alias, OPTIONS={"options": f"-c search_path={option}"}):
                yield alias
        finally:
            admin.execute(psql.SQL("DROP SCHEMA {} CASCADE").format(psql.Identifier(first)))


@pytest.mark.postgres
class TestSchemas:
    def test_another_schema_than_public(self, tenant: str) -> None:
        here, there = Stream("orders"), Stream("orders", using=tenant)
        here.append({"in": "public"})
        there.append_many([{"data": {"in": "tenant"}}] * 2)
        there.append_on_commit({"in": "tenant"})
        assert [r.data["in"] for r in there.replay()] == ["tenant"] * 3
        assert [r.data["in"] for r in here.replay()] == ["public"]
        there.trim(max_records=1)
        there.delete()
        assert here.info().count == 1
        assert sql.missing(connections[tenant]) == []

    def test_a_session_with_another_search_path(self, tenant: str) -> None:
        """Functions and triggers find their own tables, whoever calls."""
        stream = Stream("orders", using=tenant)
        stream.append({"n": 0})
        schema = psql.Identifier(WEIRD)
        with session() as other:
            other.execute("SET search_path = pg_catalog")
            call = psql.SQL(
                "SELECT position FROM {}.echomq_append_v1('orders', '[{{\"data\": {{\"n\": 1}}}}]')"
            ).format(schema)
            assert other.execute(call).fetchone() == (1,)
            with other.transaction():
                call = psql.SQL(
                    "SELECT {}.echomq_append_on_commit_v1('orders', '[{{\"data\": {{\"n\": 2}}}}]')"
                ).format(schema)
                other.execute(call)
                other.execute("SET LOCAL search_path = public")
            with pytest.raises(psycopg.DatabaseError) as caught:
                other.execute(psql.SQL("DELETE FROM {}.echomq_record").format(schema))
            assert caught.value.sqlstate == "EQ003"
        assert [r.data["n"] for r in stream.replay()] == [0, 1, 2]
        assert not Outbox.objects.using(tenant).exists()

    def test_objects_of_another_schema_in_the_path_do_not_count(self) -> None:
        """Tables here, functions there: those would write to the tables over there."""
        with in_schema("mine", "mine", "public") as alias:
            with connections[alias].schema_editor() as editor:
                for model in (StreamRow, Record, Outbox):
                    editor.create_model(model)
            assert "echomq_append_v1" in sql.missing(connections[alias])
            sql.install(connections[alias])
            assert "echomq_append_v1" not in sql.missing(connections[alias])
            Stream("orders", using=alias).append({})
            assert not StreamRow.objects.exists()
            sql.remove(connections[alias])
        assert sql.missing(connection) == []

    def test_a_renamed_schema_is_noticed_and_mended(self, tenant: str) -> None:
        """The functions still look in the schema of their install."""
        Stream("orders", using=tenant).append({"n": 0})
        with (
            session() as admin,
            database_alias("moved", OPTIONS={"options": "-c search_path=moved"}),
        ):
            name = psql.Identifier(WEIRD)
            admin.execute(psql.SQL("ALTER SCHEMA {} RENAME TO moved").format(name))
            try:
                with pytest.raises(ProgrammingError):
                    Stream("orders", using="moved").append({})
                assert "echomq_append_v1" in sql.missing(connections["moved"])
                sql.install(connections["moved"])
                assert sql.missing(connections["moved"]) == []
                assert Stream("orders", using="moved").append({"n": 1}).position == 1
            finally:
                connections["moved"].close()
                admin.execute(psql.SQL("ALTER SCHEMA moved RENAME TO {}").format(name))


class TestRecordsWithoutTheirStream:
    def test_a_new_stream_never_takes_over_the_records_of_a_lost_one(self, tmp_path: Path) -> None:
        """A restore of one table only, with the ids counting from 1 again."""
        with empty_database("partial", tmp_path) as alias:
            call_command("migrate", "echomq", database=alias, verbosity=0)
            Stream("orders", using=alias).append({"of": "orders"})
            sql.remove(connections[alias])
            with connections[alias].cursor() as cursor:
                cursor.execute("DELETE FROM echomq_stream")
                for statement in connections[alias].ops.sequence_reset_by_name_sql(
                    no_style(), [{"table": "echomq_stream", "column": "id"}]
                ):
                    cursor.execute(statement)
            sql.install(connections[alias])
            with pytest.raises(DatabaseError, match="records of a lost stream"):
                Stream("new", using=alias).append({"of": "new"})
