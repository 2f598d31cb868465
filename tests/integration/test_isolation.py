"""REPEATABLE READ and SERIALIZABLE projects on PostgreSQL: what works, and what says so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from psycopg import IsolationLevel

from echomq_app.cancel import CancelToken
from echomq_app.exceptions import InsideTransaction, IsolationError
from echomq_app.models import Outbox, Record
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Stream, append_all
from tests.databases import (
    concurrently,
    database_alias,
    in_thread,
    session,
    waiting_sessions,
)
from tests.wait import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

LEVELS = ["REPEATABLE READ", "SERIALIZABLE"]
APPEND = """SELECT echomq_append_v1('orders', '[{"data": {"n": 1}}]')"""


@contextlib.contextmanager
def by_options(level: str) -> Iterator[str]:
    number = IsolationLevel[level.replace(" ", "_")]
    with database_alias("strict", OPTIONS={"isolation_level": number}) as alias:
        yield alias


@contextlib.contextmanager
def by_role(level: str) -> Iterator[str]:
    with session() as admin:
        admin.execute("DROP ROLE IF EXISTS strict")
        admin.execute("CREATE ROLE strict LOGIN SUPERUSER")
        admin.execute(f"ALTER ROLE strict SET default_transaction_isolation = '{level}'")
        try:
            with database_alias("strict", USER="strict") as alias:
                yield alias
        finally:
            admin.execute("DROP ROLE strict")


@contextlib.contextmanager
def by_database(level: str) -> Iterator[str]:
    with session() as admin:
        name = admin.info.dbname
        admin.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
        try:
            with database_alias("strict") as alias:
                yield alias
        finally:
            admin.execute(f"ALTER DATABASE {name} RESET default_transaction_isolation")
            connections.close_all()  # a session begun meanwhile would keep the level


@pytest.fixture(params=[by_options, by_role, by_database])
def how(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture(params=LEVELS)
def strict(request: pytest.FixtureRequest, how: object) -> Iterator[str]:
    """Give an alias whose transactions are of a level above READ COMMITTED."""
    with how(request.param) as alias:  # type: ignore[operator]
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            assert cursor.fetchone() == (request.param.lower(),)
        yield alias


class TestOutsideATransaction:
    def test_append_works(self, strict: str) -> None:
        stream = Stream("orders", using=strict)
        assert [stream.append({"n": n}).position for n in range(3)] == [0, 1, 2]
        assert stream.append({"n": 3}, expected_cursor=3, idempotency_key="a").position == 3
        assert stream.append({"n": 3}, idempotency_key="a").duplicate

    def test_append_of_several_works(self, strict: str) -> None:
        stream = Stream("orders", using=strict)
        assert len(stream.append_many([{"data": n} for n in range(6_000)])) == 6_000
        receipts = append_all({"orders": [{"data": 1}], "bills": [{"data": 2}]}, using=strict)
        assert (receipts["orders"][0].position, receipts["bills"][0].position) == (6_000, 0)

    def test_append_is_read_committed_and_never_conflicts(self, strict: str) -> None:
        """Each waits for the other's lock; with an older snapshot most would fail."""
        stream = Stream("orders", using=strict)

        def append() -> None:
            for n in range(20):
                stream.append({"n": n})

        concurrently(*[append] * 4)
        assert [record.position for record in stream.replay()] == list(range(80))

    def test_append_on_commit_is_left_to_the_relay_at_most(self, strict: str) -> None:
        stream = Stream("orders", using=strict)
        stream.append_on_commit({"n": 0})
        stream.relay()
        assert [record.data["n"] for record in stream.replay()] == [0]

    def test_keeping_works(self, strict: str) -> None:
        stream = Stream("orders", using=strict)
        stream.append_many([{"data": n} for n in range(10)])
        assert stream.trim(max_records=4).trimmed == 6
        stream.set_retention(max_records=3)
        stream.rotate_epoch()
        stream.delete()
        assert not Record.objects.exists()


class TestInsideATransaction:
    def test_append_says_what_to_do(self, strict: str) -> None:
        stream = Stream("orders", using=strict)
        with pytest.raises(IsolationError, match=r"append_on_commit\(\)"):
            with transaction.atomic(using=strict):
                stream.append({})
        with pytest.raises(IsolationError, match=r"append_on_commit\(\)"):
            with transaction.atomic(using=strict):
                append_all({"orders": [{"data": 1}], "bills": [{"data": 2}]}, using=strict)
        with pytest.raises(IsolationError):
            with transaction.atomic(using=strict):
                stream.append_many([{"data": n} for n in range(6_000)])
        assert not StreamRow.objects.exists()
        assert stream.append({}).position == 0

    def test_append_on_commit_works_and_the_relay_moves_it(self, strict: str) -> None:
        stream = Stream("orders", using=strict)
        with transaction.atomic(using=strict):
            stream.append_on_commit({"n": 0}, key="k", idempotency_key="a")
            stream.append_many_on_commit([{"data": {"n": 1}}, {"data": {"n": 2}}])
        with transaction.atomic(using=strict):
            stream.append_on_commit({"n": -1})
            transaction.set_rollback(True, using=strict)
        assert Outbox.objects.count() == 3
        assert stream.relay() == 3
        assert [record.data["n"] for record in stream.replay()] == [0, 1, 2]
        assert not Outbox.objects.exists()
        assert stream.relay() == 0

    def test_a_tail_moves_it_right_after(self, strict: str) -> None:
        stream, stop = Stream("orders", using=strict), CancelToken()
        seen: list[int] = []

        def follow() -> None:
            for record in stream.tail(stop=stop):
                seen.append(record.data["n"])
                if record.data["n"] == 2:
                    stop.cancel()

        with in_thread(follow) as following:
            for n in range(3):
                with transaction.atomic(using=strict):
                    stream.append_on_commit({"n": n})
            following.result(30)
        assert seen == [0, 1, 2]

    def test_relay_and_tail_refuse(self, strict: str) -> None:
        stream = Stream("orders", using=strict)
        with transaction.atomic(using=strict):
            with pytest.raises(InsideTransaction, match="after the commit"):
                stream.relay()
            with pytest.raises(InsideTransaction, match=r"read\(\)"):
                next(stream.tail())

    def test_reads_show_one_moment(self, strict: str) -> None:
        stream = Stream("orders", using=strict)
        stream.append({"n": 0})
        with transaction.atomic(using=strict):
            assert stream.info().write_cursor == 1
            Stream("orders").append({"n": 1})
            page = stream.read()
            assert (len(page.records), page.write_cursor, page.caught_up) == (1, 1, True)
        assert [record.data["n"] for record in stream.read(page.token).records] == [1]


@contextlib.contextmanager
def atomic_at(level: str) -> Iterator[None]:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        yield


@pytest.mark.parametrize("level", LEVELS)
class TestSetTransaction:
    """A project at READ COMMITTED with one transaction that isn't."""

    def test_inside(self, level: str) -> None:
        stream = Stream("orders")
        with pytest.raises(IsolationError), atomic_at(level):
            stream.append({})
        with atomic_at(level):
            stream.append_on_commit({"n": 0})
        assert stream.relay() == 1
        assert stream.append({"n": 1}).position == 1

    def test_relayed_rows_and_later_commits_keep_each_ones_order(self, level: str) -> None:
        stream = Stream("orders")
        with atomic_at(level):
            stream.append_many_on_commit([{"data": {"n": n}} for n in range(3)])
        with transaction.atomic():
            stream.append_many_on_commit([{"data": {"n": n}} for n in range(3, 6)])
        stream.relay()
        assert [record.data["n"] for record in stream.replay()] == [3, 4, 5, 0, 1, 2]

    def test_delete_leaves_no_record_behind(self, level: str) -> None:
        """What was appended while delete waits for the stream's lock goes, too."""
        stream = Stream("orders")
        stream.append({"n": 0})
        with by_role(level) as alias, session() as appender:

            def overtake(execute: Any, sql: str, *rest: Any) -> Any:
                if sql.startswith("UPDATE") and 'SET "first_position" = "' in sql:
                    appender.execute("BEGIN")
                    appender.execute(APPEND)
                return execute(sql, *rest)

            def delete() -> None:
                with connections[alias].execute_wrapper(overtake):
                    Stream("orders", using=alias).delete()

            with in_thread(delete) as deleting:
                wait_until(lambda: waiting_sessions() == 1)
                appender.execute("COMMIT")
                deleting.result(30)
        assert not StreamRow.objects.exists() and not Record.objects.exists()

    def test_delete_takes_what_waits_for_the_relay(self, level: str) -> None:
        stream = Stream("orders")
        stream.append({})
        with by_role(level) as alias, transaction.atomic(using=alias):
            Stream("orders", using=alias).append_on_commit({})
        stream.delete()
        assert stream.relay() == 0 and not StreamRow.objects.exists()

    def test_delete_inside_says_what_to_do(self, level: str) -> None:
        stream = Stream("orders")
        stream.append({})
        with pytest.raises(IsolationError, match="outside"), atomic_at(level):
            stream.delete()
        assert stream.info().count == 1


@pytest.fixture
def counter() -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE counter AS SELECT 0 AS n")
        yield
        cursor.execute("DROP TABLE counter")


@pytest.mark.usefixtures("counter")
def test_append_again_after_a_serialization_failure() -> None:
    """The retry that SERIALIZABLE asks of everybody writes each record once."""

    def count_up(*, overtaken: bool) -> None:
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            Stream("orders", using=alias).append_on_commit({}, idempotency_key="a")
            cursor.execute("SELECT n FROM counter")
            if overtaken:
                other.execute("UPDATE counter SET n = n + 1")
            cursor.execute("UPDATE counter SET n = n + 1")

    with by_options("SERIALIZABLE") as alias, session() as other:
        with pytest.raises(OperationalError, match="could not serialize"):
            count_up(overtaken=True)
        count_up(overtaken=False)
        count_up(overtaken=False)
    assert Stream("orders").relay() == 2
    assert Stream("orders").info().count == 1
