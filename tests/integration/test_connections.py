"""Every verb over connections of other kinds: bound parameters, few rights, replicas, a restore."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import connection, connections, router, transaction
from django.test import override_settings

from echomq_app.cancel import CancelToken
from echomq_app.core.names import stream_wake_group
from echomq_app.engine.process import engine
from echomq_app.exceptions import CursorInvalid, UnknownStream
from echomq_app.models import Outbox, sql
from echomq_app.stream import Stream, append_all
from tests.databases import database_alias, empty_database, in_thread, session
from tests.servers import find_postgres
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "other"])


def exercise(alias: str) -> None:
    """Use every verb once; what they return is tested elsewhere."""
    stream = Stream("orders", using=alias)
    token = stream.append({"n": 0}, type="a", key="k", expected_cursor=0).token
    stream.append_many([{"data": {"n": n}, "idempotency_key": f"{n}"} for n in range(1, 5)])
    append_all({"orders": [{"data": {"n": 5}}], "bills": [{"data": 1}]}, using=alias)
    with transaction.atomic(using=alias):
        stream.append_on_commit({"n": 6})
    assert [record.data["n"] for record in stream.replay()] == list(range(7))
    assert stream.read(token, types=["", "b"]).records[0].data == {"n": 1}
    assert [record.data["n"] for record in stream.replay(key="k")] == [0]
    info = stream.info()
    assert info.newest_at is not None and stream.cursor_at(info.newest_at) <= 6
    assert stream.trim(max_records=3).trimmed == 4
    stream.set_retention(max_records=5)
    stream.rotate_epoch()
    stop = CancelToken()
    for record in stream.tail(stop=stop):
        if record.position == 6:
            stop.cancel()
    assert stream.relay() == 0
    stream.delete()
    Stream("bills", using=alias).delete()


@pytest.mark.postgres
@pytest.mark.parametrize(
    "options",
    [{"server_side_binding": True}, {"prepare_threshold": 0}, {"pool": True}],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_driver(options: dict[str, object]) -> None:
    with database_alias("special", OPTIONS=options) as alias:
        for _ in range(2):
            exercise(alias)


def test_without_autocommit() -> None:
    with database_alias("manual", AUTOCOMMIT=False) as alias:
        stream = Stream("orders", using=alias)
        stream.append({"n": 0})
        stream.append_on_commit({"n": -1})
        connections[alias].rollback()
        with pytest.raises(UnknownStream):
            Stream("orders").read()
        stream.append({"n": 0})
        stream.append_on_commit({"n": 1})
        connections[alias].commit()
        assert [record.data["n"] for record in Stream("orders").replay()] == [0, 1]


@pytest.fixture
def clerk() -> Iterator[str]:
    """Give an alias whose role may use our tables, and owns nothing."""
    with session() as admin:
        admin.execute("DROP ROLE IF EXISTS clerk")
        admin.execute("CREATE ROLE clerk LOGIN")
        for table in ("stream", "record", "outbox"):
            admin.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON echomq_{table} TO clerk")
        admin.execute("GRANT USAGE ON SEQUENCE echomq_stream_id_seq, echomq_outbox_id_seq TO clerk")
        try:
            with database_alias("clerk", USER="clerk") as alias:
                yield alias
        finally:
            admin.execute("DROP OWNED BY clerk")
            admin.execute("DROP ROLE clerk")


@pytest.mark.postgres
def test_a_role_that_owns_nothing(clerk: str) -> None:
    exercise(clerk)


class TestReplica:
    """An explicit read elsewhere. It may be behind, and is never written to."""

    @pytest.fixture
    def replica(self) -> Iterator[str]:
        readonly = {
            "postgresql": {"options": "-c default_transaction_read_only=on"},
            "sqlite": {
                "init_command": "PRAGMA query_only = 1",
                "transaction_mode": None,
            },
        }
        with database_alias("replica", OPTIONS=readonly[connection.vendor]) as alias:
            yield alias

    def test_reads(self, replica: str) -> None:
        Stream("orders").append_many([{"data": n} for n in range(3)])
        stream = Stream("orders", using=replica)
        assert [record.data for record in stream.replay()] == [0, 1, 2]
        assert stream.info().write_cursor == 3

    def test_behind_is_an_empty_page_that_resumes_at_the_same_place(self, replica: str) -> None:
        home, stream = Stream("orders"), Stream("orders", using=replica)
        token = home.append_many([{"data": n} for n in range(3)])[-1].token
        ahead = f"{token.split(':')[0]}:7:0123abcd"
        for cursor in (7, ahead):
            page = stream.read(cursor)
            assert (page.records, page.cursor, page.write_cursor) == ([], 7, 3)
            assert page.caught_up
        assert stream.read(ahead).token == ahead
        with pytest.raises(CursorInvalid):
            home.read(ahead)

    def test_tail_follows_and_writes_nothing(self, replica: str) -> None:
        home, stop = Stream("orders"), CancelToken()
        home.append(0)
        if connection.vendor == "postgresql":
            Outbox.objects.create(stream="orders", record={"data": "waits for a relay"})
        seen: list[object] = []

        def follow() -> None:
            for record in Stream("orders", using=replica).tail(stop=stop):
                seen.append(record.data)
                if record.data == 1:
                    stop.cancel()

        with in_thread(follow) as following:
            wait_until(lambda: seen == [0])
            home.append(1)
            following.result(30)
        assert seen == [0, 1]

    def test_tail_waits_for_a_stream_that_is_not_there_yet(self, replica: str) -> None:
        with in_thread(lambda: next(Stream("orders", using=replica).tail())) as following:
            wait_until(lambda: engine._switchboard.wants(stream_wake_group("orders")))
            Stream("orders").append(7)
            assert following.result(30).data == 7


class Switching:
    """A router whose answer changes: by tenant, by time of day."""

    alias = "default"

    def db_for_write(self, model: object, **hints: object) -> str:
        return self.alias

    db_for_read = db_for_write


def test_a_stream_that_is_kept_asks_the_router_again() -> None:
    """As a constant of a module it is made long before the first request."""
    switching = Switching()
    with override_settings(DATABASE_ROUTERS=[switching]):
        stream = Stream("orders")
        stream.append({"in": "default"})
        switching.alias = "other"
        assert router.db_for_write(Outbox) == stream.using == "other"
        stream.append({"in": "other"})
        assert [record.data for record in stream.replay()] == [{"in": "other"}]
        assert stream.info().write_cursor == 1


@pytest.mark.postgres
def test_dump_and_restore(tmp_path: Path) -> None:
    """What pg_dump writes is a whole log again: objects, records, places of readers."""
    stream = Stream("orders")
    stream.append_many([{"data": {"n": n}} for n in range(5)])
    stream.trim(before=2)
    token = stream.read(limit=1).token
    where = connection.get_connection_params()
    folder, env = find_postgres(), {**os.environ, "PGUSER": "postgres", "PGHOST": where["host"]}

    def run(program: str, *arguments: str) -> None:
        subprocess.run([folder / program, *arguments], env=env, check=True, timeout=60)

    dump = str(tmp_path / "dump.sql")
    run("pg_dump", "-f", dump, "-d", where["dbname"])
    with empty_database("restored", tmp_path) as alias:
        run(
            "psql",
            "-q",
            "-v",
            "ON_ERROR_STOP=1",
            "-f",
            dump,
            "-o",
            os.devnull,
            "-d",
            connections[alias].settings_dict["NAME"],
        )
        assert sql.missing(connections[alias]) == []
        again = Stream("orders", using=alias)
        assert [record.data["n"] for record in again.read(token).records] == [3, 4]
        assert again.append({"n": 5}).position == 5
        with transaction.atomic(using=alias):
            again.append_on_commit({"n": 6})
        again.trim(max_records=0)
        again.delete()
        exercise(alias)
