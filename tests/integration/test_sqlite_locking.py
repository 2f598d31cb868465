"""SQLite has one writer at a time: what works, what is refused, and what the refusal says."""

from __future__ import annotations

import sys

import pytest
from django.core.management import call_command
from django.db import transaction

from echomq_app.exceptions import DatabaseLocked
from echomq_app.stream import Stream
from project.children import Child
from tests.databases import concurrently, database_alias

pytestmark = [pytest.mark.sqlite, pytest.mark.django_db(transaction=True)]


class TestDeferredTransactionsOnSQLite:
    """Django's default, where BEGIN takes no lock: what we warn about, and can't mend."""

    def test_read_before_append_says_what_to_set(self) -> None:
        with database_alias("deferred", OPTIONS={"transaction_mode": None}) as alias:
            stream = Stream("orders", using=alias)
            Stream("orders").append({"n": 0})

            @transaction.atomic(using=alias)
            def read_then_append() -> None:
                assert stream.info().write_cursor == 1
                Stream("orders").append({"n": 1})
                stream.append({"n": -1})

            with pytest.raises(
                DatabaseLocked, match=r"transaction_mode'\] = 'IMMEDIATE'"
            ) as caught:
                read_then_append()
            assert "'deferred'" in str(caught.value) and "nothing was written" in str(caught.value)
            with transaction.atomic(using=alias):
                stream.append({"n": 2})  # the first statement is a write, so this waits
        assert [record.data["n"] for record in Stream("orders").replay()] == [0, 1, 2]

    def test_transactions_that_only_append_wait_for_each_other(self) -> None:
        """Because the first statement is a write: none is refused for a snapshot too old."""
        Stream("orders").append({"n": -1})
        with database_alias("deferred", OPTIONS={"transaction_mode": None}) as alias:

            def append_some() -> None:
                for n in range(50):
                    with transaction.atomic(using=alias):
                        Stream("orders", using=alias).append({"n": n})

            concurrently(append_some, append_some, append_some)
        assert Stream("orders").info().count == 151

    def test_two_processes_that_read_then_append(self, subprocess_env: dict[str, str]) -> None:
        """Some are refused; none of the others is lost or doubled."""
        code = """
import sys, django
django.setup()
from django.db import connections, transaction
from echomq_app.exceptions import DatabaseLocked
from echomq_app.stream import Stream
connections.databases["default"]["OPTIONS"]["transaction_mode"] = None
stream = Stream("orders")
for n in range(40):
    while True:
        try:
            with transaction.atomic():
                cursor = stream.info().write_cursor
                receipt = stream.append({"by": sys.argv[1], "n": n})
                assert receipt.position == cursor
            break
        except DatabaseLocked:
            pass
"""
        Stream("orders").set_retention()
        command = [sys.executable, "-c", code]
        with (
            Child([*command, "a"], env=subprocess_env, name="a") as a,
            Child([*command, "b"], env=subprocess_env, name="b") as b,
        ):
            assert (a.wait(60), b.wait(60)) == (0, 0)
        records = [(record.data["by"], record.data["n"]) for record in Stream("orders").replay()]
        assert sorted(records) == [(name, n) for name in "ab" for n in range(40)]


def test_immediate_transactions_on_sqlite_are_never_refused(subprocess_env: dict[str, str]) -> None:
    """Four processes and this one read, then append, on one file, as fast as they can."""
    code = """
import sys, django
django.setup()
from django.db import transaction
from echomq_app.stream import Stream
for n in range(60):
    with transaction.atomic():
        cursor = Stream("orders").info().write_cursor
        assert Stream("orders").append({"by": sys.argv[1], "n": n}).position == cursor
"""
    Stream("orders").set_retention()
    children = [
        Child([sys.executable, "-c", code, name], env=subprocess_env, name=name) for name in "abcd"
    ]
    try:
        while any(child.running for child in children):
            with transaction.atomic():
                cursor = Stream("orders").info().write_cursor
                receipt = Stream("orders").append({"by": "web", "n": cursor})
            assert receipt.position == cursor
        assert [child.wait() for child in children] == [0] * 4, children[0].output
    finally:
        for child in children:
            child.stop()
    records = list(Stream("orders").replay())
    assert [record.position for record in records] == list(range(len(records)))
    for name in "abcd":
        assert [r.data["n"] for r in records if r.data["by"] == name] == list(range(60))


def test_the_wait_for_another_writer_ends_with_the_timeout() -> None:
    stream = Stream("orders")
    with database_alias("impatient", OPTIONS={"timeout": 0.05}) as alias:
        with transaction.atomic():
            stream.append({"n": 0})
            with pytest.raises(DatabaseLocked, match=r"raise OPTIONS\['timeout'\]"):
                Stream("orders", using=alias).append({"n": 1})
    assert stream.info().write_cursor == 1


def test_a_database_in_memory_that_threads_share() -> None:
    """Django's default for tests. SQLite locks its tables, and lets nobody wait for them."""
    name = "file:shared?mode=memory&cache=shared"
    with database_alias("memory", NAME=name, OPTIONS={"transaction_mode": None}) as alias:
        call_command("migrate", "echomq", database=alias, verbosity=0)
        stream = Stream("orders", using=alias)

        def refused() -> str:
            with pytest.raises(DatabaseLocked) as caught:
                stream.append({"n": -1})
            return str(caught.value)

        with transaction.atomic(using=alias):
            stream.append({"n": 0})
            (message,) = concurrently(refused)
        assert "DATABASES['memory']['TEST'] = {'NAME': 'test.sqlite3'}" in message
        concurrently(lambda: stream.append({"n": 1}))
        assert [record.data["n"] for record in stream.replay()] == [0, 1]
