"""Migrations there and back, later ones that rebuild our tables, and projects without any."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import DatabaseError, connection, connections, transaction
from django.db.migrations import Migration
from django.test import override_settings

import echomq_app.migrations
from echomq_app import engine
from echomq_app.core.names import stream_wake_group
from echomq_app.exceptions import CursorInvalid
from echomq_app.models import Outbox, Record, sql
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Stream, StreamRecord
from tests.databases import empty_database

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])

LATER = """
from django.db import migrations, models
import echomq_app.models.fields

class Migration(migrations.Migration):
    dependencies = [("echomq", "0004_outbox_keys")]
    operations = [
        migrations.AlterField("record", "type", models.CharField(max_length=120, default="")),
        migrations.AlterField("record", "data", models.JSONField(null=True)),
        migrations.AddField("record", "added", models.IntegerField(default=7)),
        migrations.AlterField(
            "stream", "name", echomq_app.models.fields.NameField(max_length=80, unique=True)
        ),
        migrations.AddField("stream", "added", models.IntegerField(null=True)),
        migrations.AddField("outbox", "added", models.IntegerField(null=True)),
    ]
"""
FAILING = LATER + "        migrations.RunPython(lambda apps, editor: 1 / 0),\n    ]\n"


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[str]:
    """Give the alias of a database that holds our tables and nothing else."""
    with empty_database("fresh", tmp_path) as alias:
        migrate(alias)
        yield alias


def migrate(alias: str, *target: str, **options: Any) -> None:
    call_command("migrate", "echomq", *target, database=alias, verbosity=0, **options)


def objects(alias: str) -> list[str]:
    """List what a database holds of ours: tables, functions, triggers."""
    statements = {
        "sqlite": "SELECT name FROM sqlite_master WHERE name LIKE '%echomq%'",
        "postgresql": "SELECT proname::text FROM pg_proc WHERE proname LIKE 'echomq%'"
        " UNION ALL SELECT relname::text FROM pg_class WHERE relname LIKE 'echomq%'"
        " UNION ALL SELECT tgname::text FROM pg_trigger WHERE tgname LIKE 'echomq%'",
    }
    with connections[alias].cursor() as cursor:
        cursor.execute(statements[connections[alias].vendor])
        return [row[0] for row in cursor.fetchall()]


class TestThereAndBack:
    def test_zero_leaves_nothing_and_the_way_forward_is_open(self, fresh: str) -> None:
        Stream("orders", using=fresh).append({})
        migrate(fresh, "zero")
        assert objects(fresh) == []
        migrate(fresh)
        assert sql.missing(connections[fresh]) == []
        assert Stream("orders", using=fresh).append({}).position == 0

    def test_step_by_step(self, fresh: str) -> None:
        """Tables without the second migration still get the objects; zero takes all away."""
        migrate(fresh, "0001")
        assert sql.missing(connections[fresh]) == []
        assert Stream("orders", using=fresh).append({}).position == 0
        migrate(fresh, "zero")
        assert objects(fresh) == []

    def test_models_and_migrations_agree(self) -> None:
        call_command("makemigrations", "echomq", check=True, dry_run=True, verbosity=0)

    def test_sqlmigrate_prints(self) -> None:
        for name in ("0001", "0002", "0003", "0004"):
            call_command("sqlmigrate", "echomq", name, stdout=io.StringIO())


@pytest.fixture
def later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a package of our migrations that a test may add to."""
    package = tmp_path / f"later_{tmp_path.name.replace('-', '_')}"
    shutil.copytree(Path(echomq_app.migrations.__path__[0]), package)
    monkeypatch.syspath_prepend(tmp_path)
    with override_settings(MIGRATION_MODULES={"echomq": package.name}):
        yield package


class TestLaterMigrations:
    def test_alter_and_add_fields_keep_data_and_guards(self, fresh: str, later: Path) -> None:
        stream = Stream("orders", using=fresh)
        stream.append_many([{"data": {"n": n}, "key": "k"} for n in range(5)])
        token = stream.read(limit=2).token
        (later / "0004_later.py").write_text(LATER)
        migrate(fresh)
        assert sql.missing(connections[fresh]) == []
        with connections[fresh].cursor() as cursor:
            cursor.execute("SELECT count(*), min(added) FROM echomq_record")
            assert cursor.fetchone() == (5, 7)
            if connection.vendor == "postgresql":
                cursor.execute(
                    "SELECT DISTINCT collname FROM pg_attribute a JOIN pg_collation c"
                    " ON c.oid = a.attcollation WHERE (attrelid, attname) IN"
                    " (('echomq_stream'::regclass, 'name'), ('echomq_outbox'::regclass, 'stream'))"
                )
                assert cursor.fetchall() == [("C",)]
            # Our models, which don't know the column, stand for the code before the deploy.
            if connection.vendor == "postgresql":
                cursor.execute("ALTER TABLE echomq_record ALTER added SET DEFAULT 0")
        assert [record.data["n"] for record in stream.read(token).records] == [2, 3, 4]
        with pytest.raises(DatabaseError, match="append-only"):
            Record.objects.using(fresh).update(key="x")
        if connection.vendor == "postgresql":
            assert stream.append({"n": 5}).position == 5
            stream.append_on_commit({"n": 6})
            assert stream.info().write_cursor == 7
        migrate(fresh, "0003")
        assert stream.append({"n": 7}).position == stream.info().write_cursor - 1
        assert sql.missing(connections[fresh]) == []

    def test_a_failed_migration_is_mended_by_the_next(self, fresh: str, later: Path) -> None:
        Stream("orders", using=fresh).append({})
        bad = later / "0004_later.py"
        bad.write_text(FAILING.replace("    ]\n        migrations.Run", "        migrations.Run"))
        with pytest.raises(ZeroDivisionError):
            migrate(fresh)
        bad.unlink()
        migrate(fresh)
        assert sql.missing(connections[fresh]) == []
        assert Stream("orders", using=fresh).append({}).position == 1

    def test_other_apps_migrations_leave_ours_alone(self, fresh: str) -> None:
        config = apps.get_app_config("echomq")
        plan = [(Migration("0001", "shop"), False), (Migration("0002", "shop"), True)]
        sql.before_migrate(sender=config, using=fresh, plan=plan)
        assert sql.missing(connections[fresh]) == []


def test_without_migrations(tmp_path: Path) -> None:
    """What pytest-django's --nomigrations and `TEST: {"MIGRATE": False}` do."""
    with empty_database("bare", tmp_path) as alias:
        with override_settings(MIGRATION_MODULES={"echomq": None}):
            call_command("migrate", database=alias, run_syncdb=True, verbosity=0)
        assert sql.missing(connections[alias]) == []
        stream = Stream("orders", using=alias)
        stream.append({"n": 0})
        stream.append_on_commit({"n": 1})
        assert stream.info().write_cursor == 2


class OnOther:
    """A router that keeps this app on `other`."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "echomq" else None

    db_for_read = db_for_write

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return db in ("other", "fresh") if app_label == "echomq" else None


@pytest.fixture
def on_other() -> Iterator[None]:
    with override_settings(DATABASE_ROUTERS=[OnOther()]):
        yield


@pytest.mark.usefixtures("on_other")
class TestSecondDatabase:
    def test_every_verb_goes_where_the_router_says(self) -> None:
        stream = Stream("orders")
        assert stream.using == "other"
        stream.append({"n": 0})
        stream.append_on_commit({"n": 1})
        assert [record.data["n"] for record in stream.replay()] == [0, 1]
        assert Record.objects.using("other").count() == 2
        assert Record.objects.using("default").count() == 0
        stream.delete()
        assert not StreamRow.objects.using("other").exists()

    def test_joins_the_transaction_of_its_own_database_only(self) -> None:
        stream = Stream("orders")
        with transaction.atomic(using="default"):
            stream.append({"n": 0})
            stream.append_on_commit({"n": 1})
            transaction.set_rollback(True, using="default")
        with transaction.atomic(using="other"):
            stream.append({"n": -1})
            stream.append_on_commit({"n": -1})
            transaction.set_rollback(True, using="other")
        assert [record.data["n"] for record in stream.replay()] == [0, 1]

    def test_wakes_readers_after_the_commit_of_that_database(self) -> None:
        with engine.waiter(stream_wake_group("orders")) as waiter:
            with transaction.atomic(using="default"):
                with transaction.atomic(using="other"):
                    Stream("orders").append({})
                    assert not waiter.wait(0)
                assert waiter.wait(10)

    def test_a_database_without_our_tables_gets_nothing_of_ours(self, tmp_path: Path) -> None:
        with empty_database("elsewhere", tmp_path) as alias:
            call_command("migrate", database=alias, verbosity=0)
            assert objects(alias) == []
            assert "auth_user" in connections[alias].introspection.table_names()
            assert not sql.serves(alias)

    def test_an_allowed_database_gets_all(self, fresh: str) -> None:
        assert sql.serves(fresh) and sql.missing(connections[fresh]) == []


class TestFlushAndFixtures:
    def test_flush(self) -> None:
        stream = Stream("orders")
        token = stream.append_many([{"data": n} for n in range(3)])[-1].token
        Outbox.objects.create(stream="orders", record={"data": 3})
        call_command("flush", interactive=False, verbosity=0)
        assert not (StreamRow.objects.exists() or Record.objects.exists())
        assert not Outbox.objects.exists()
        assert sql.missing(connection) == []
        assert stream.append(0).position == 0
        with pytest.raises(CursorInvalid) as caught:
            stream.read(token)
        assert caught.value.reason == "epoch"

    def test_sqlflush_names_our_tables(self) -> None:
        out = io.StringIO()
        call_command("sqlflush", stdout=out)
        assert "echomq_record" in out.getvalue() and "echomq_outbox" in out.getvalue()

    def test_dump_and_load_give_the_same_log(self, tmp_path: Path) -> None:
        stream = Stream("orders")
        stream.append_many(
            [
                {"data": {"n": n, "deep": [None, 1.5, "é"]}, "key": f"k{n}", "headers": {"h": n}}
                for n in range(20)
            ]
        )
        stream.append(None, idempotency_key="once")
        stream.trim(max_records=10)
        before, token = list(stream.replay()), stream.read(limit=3).token
        fixture = tmp_path / "log.json"
        call_command("dumpdata", "echomq", output=str(fixture), verbosity=0)
        call_command("flush", interactive=False, verbosity=0)
        call_command("loaddata", str(fixture), verbosity=0)
        # Django's serializers keep milliseconds of a time.
        assert [plain(record) for record in stream.replay()] == [plain(r) for r in before]
        assert [record.position for record in stream.read(token).records] == list(range(14, 21))
        assert stream.append(None, idempotency_key="once").duplicate
        assert stream.append({"n": 21}).position == 21
        assert Stream("next").append({}).position == 0
        call_command("loaddata", str(fixture), verbosity=0)
        assert stream.info().write_cursor == 22
        changed = fixture.read_text().replace("k15", "k99")
        fixture.write_text(changed)
        with pytest.raises(DatabaseError, match="append-only"):
            call_command("loaddata", str(fixture), verbosity=0)


def plain(record: StreamRecord) -> tuple[object, ...]:
    return (record.token, record.type, record.key, record.data, record.headers)
