"""Append on commit: there if and only if the transaction is, and nobody waits for it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction

from echomq_app.exceptions import UnknownStream
from echomq_app.models import Outbox, Record
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Stream, append_all
from echomq_app.testing import flush_outbox
from project.children import Child
from tests.databases import concurrently, in_thread, session, waiting_sessions
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def numbers(name: str = "orders") -> list[int]:
    return [record.data["n"] for record in Stream(name).replay()]


def _fail_on(text: str) -> Any:
    """Let the statement fail that carries this text."""

    def fail(execute: Any, sql: str, parameters: Any, many: bool, context: Any) -> Any:
        if text in str(parameters):
            raise OperationalError("the connection broke")
        return execute(sql, parameters, many, context)

    return fail


class TestTheRecordIsThereIfTheTransactionIs:
    def test_commit(self) -> None:
        orders, bills = Stream("orders"), Stream("bills")
        with transaction.atomic():
            orders.append_on_commit({"n": 0}, type="placed", key="7", headers={"h": 1})
            bills.append_on_commit({"n": 10})
            orders.append_many_on_commit([{"data": {"n": 1}}, {"data": {"n": 2}}])
            bills.append_on_commit({"n": 11})
        assert (numbers("orders"), numbers("bills")) == ([0, 1, 2], [10, 11])
        record = orders.read().records[0]
        assert (record.type, record.key, record.headers) == ("placed", "7", {"h": 1})
        assert not Outbox.objects.exists()

    def test_without_a_transaction(self) -> None:
        Stream("orders").append_on_commit({"n": 0})
        assert numbers() == [0]

    def test_more_than_one_statement_takes_is_all_or_none(self) -> None:
        """Outside a transaction, of which each statement would be one."""
        records: list[dict[str, Any]] = [{"data": {"n": n}} for n in range(5_001)]
        records[-1]["key"] = "the last"
        with connection.execute_wrapper(_fail_on("the last")), pytest.raises(OperationalError):
            Stream("orders").append_many_on_commit(records)
        assert not (Record.objects.exists() or Outbox.objects.exists())
        Stream("orders").append_many_on_commit(records)
        assert numbers() == list(range(5_001))

    def test_rollback(self) -> None:
        with transaction.atomic():
            Stream("orders").append_on_commit({"n": 0})
            transaction.set_rollback(True)
        assert not (Outbox.objects.exists() or StreamRow.objects.exists())
        with pytest.raises(UnknownStream):
            Stream("orders").read()

    def test_rollback_of_a_savepoint(self) -> None:
        with transaction.atomic():
            Stream("orders").append_on_commit({"n": 0})
            with transaction.atomic():
                Stream("orders").append_on_commit({"n": -1})
                Stream("bills").append_on_commit({"n": -1})
                transaction.set_rollback(True)
            Stream("orders").append_on_commit({"n": 1})
        assert numbers() == [0, 1]
        with pytest.raises(UnknownStream):
            Stream("bills").read()

    def test_repeated_keys_are_skipped(self) -> None:
        stream = Stream("orders")
        stream.append({"n": 0}, idempotency_key="a")
        with transaction.atomic():
            stream.append_on_commit({"n": -1}, idempotency_key="a")
            stream.append_on_commit({"n": 1}, idempotency_key="b")
            stream.append_on_commit({"n": -1}, idempotency_key="b")
        stream.append_on_commit({"n": -1}, idempotency_key="b")
        assert numbers() == [0, 1]

    def test_mixed_with_append_in_one_transaction(self) -> None:
        with transaction.atomic():
            Stream("orders").append_on_commit({"n": 1})
            assert Stream("orders").append({"n": 0}).position in (0, 1)
        assert sorted(numbers()) == [0, 1]


@pytest.mark.postgres
class TestNobodyWaits:
    def test_ten_open_transactions_on_the_same_streams_in_opposite_orders(self) -> None:
        """All have written before any commits; then all commit at once."""
        barrier = threading.Barrier(10, timeout=30)

        def work(number: int) -> None:
            names = ["A", "B"] if number % 2 else ["B", "A"]
            for turn in range(3):
                with transaction.atomic():
                    for name in names:
                        Stream(name).append_on_commit({"by": number, "turn": turn})
                    barrier.wait()
                barrier.wait()

        concurrently(*[lambda n=n: work(n) for n in range(10)])
        for name in ("A", "B"):
            records = list(Stream(name).replay())
            assert [record.position for record in records] == list(range(30))
            for turn in range(3):
                of_turn = records[10 * turn : 10 * turn + 10]
                assert {(r.data["by"], r.data["turn"]) for r in of_turn} == {
                    (number, turn) for number in range(10)
                }

    def test_a_stopped_client_with_an_open_transaction(
        self, subprocess_env: dict[str, str]
    ) -> None:
        with open_transaction(subprocess_env) as client:
            client.send_signal(signal.SIGSTOP)
            with connection.cursor() as cursor:
                cursor.execute("SET lock_timeout = '2s'")
                Stream("orders").append({"n": 0})
                Stream("orders").append_on_commit({"n": 1})
                append_all({"orders": [{"data": {"n": 2}}], "bills": [{"data": {"n": 3}}]})
                Stream("orders").trim(max_records=1)
                cursor.execute("RESET lock_timeout")
            client.send_signal(signal.SIGCONT)
            client.send_signal(signal.SIGUSR1)
            assert client.wait() == 0
        assert numbers() == [2, 99]

    def test_names_are_locked_in_one_order_whatever_the_collation(self) -> None:
        """In C "B" comes before "a", in most languages after."""
        for name in ("B", "a"):
            Stream(name).append({"n": 0})

        def on_commit() -> None:
            with transaction.atomic():
                for name in ("a", "B"):
                    Stream(name).append_on_commit({"n": 1})

        for work in (on_commit, lambda: append_all({n: [{"data": {"n": 1}}] for n in "aB"})):
            with session() as holder, holder.transaction():
                holder.execute(LOCK, ["B"])
                with in_thread(work) as working:
                    wait_until(lambda: waiting_sessions() == 1)
                    with session() as other, other.transaction():
                        assert other.execute(LOCK + " NOWAIT", ["a"]).fetchone()
                    holder.execute("COMMIT")
                    working.result(30)
        assert (numbers("a"), numbers("B")) == ([0, 1, 1], [0, 1, 1])


LOCK = "SELECT id FROM echomq_stream WHERE name = %s FOR NO KEY UPDATE"


def open_transaction(env: dict[str, str], verb: str = "append_on_commit") -> Child:
    """Start a process that has written and appended in a transaction; SIGUSR1 commits it."""
    code = f"""
import signal, django
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
django.setup()
from django.contrib.auth.models import Group
from django.db import transaction
from echomq_app.stream import Stream
with transaction.atomic():
    Group.objects.create(name="written")
    Stream("orders").{verb}({{"n": 99}})
    print("open", flush=True)
    signal.sigwait([signal.SIGUSR1])
"""
    child = Child([sys.executable, "-c", code], env=env, name="client")
    try:
        child.wait_for_output("^open")
    except BaseException:
        child.stop()
        raise
    return child


@pytest.mark.parametrize("verb", ["append", "append_on_commit"])
def test_killed_between_write_and_commit_leaves_nothing(
    subprocess_env: dict[str, str], verb: str
) -> None:
    from django.contrib.auth.models import Group

    with open_transaction(subprocess_env, verb) as client:
        client.kill()
    wait_until(lambda: Stream("orders").append({"n": 0}).position == 0)
    assert numbers() == [0]
    assert not (Group.objects.exists() or Outbox.objects.exists())


@pytest.mark.postgres
class TestCost:
    """Counted in rows and index entries that moving the outbox reads, not in seconds."""

    def test_thousands_in_one_transaction_are_linear(self) -> None:
        # Three to eight for each, as the planner likes. Over twenty, growing with their number,
        # for a move that walks over what it has moved already.
        count = 32_000
        with transaction.atomic():
            read_before, _ = self.counters()
            for start in range(0, count, 500):
                numbered = [{"data": {"n": n}} for n in range(start, start + 500)]
                Stream("orders").append_many_on_commit(numbered)
            flush_outbox()
            read, scans = self.counters()
        assert read - read_before < 10 * count
        assert scans < 20
        assert numbers() == list(range(count))

    def counters(self) -> tuple[int, int]:
        """Return how much of the outbox this transaction has read, and its full scans."""
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT sum(pg_stat_get_xact_tuples_returned(oid)),"
                " max(pg_stat_get_xact_numscans('echomq_outbox'::regclass))"
                " FROM (SELECT 'echomq_outbox'::regclass AS oid UNION ALL"
                " SELECT indexrelid FROM pg_index WHERE indrelid = 'echomq_outbox'::regclass) t"
            )
            read, scans = cursor.fetchone()
        return int(read), int(scans)

    def test_large_records_that_compress_well(self) -> None:
        """Their sum is above what one JSON value may hold, as stored they are tiny."""
        with transaction.atomic():
            for n in range(300):
                Stream("orders").append_on_commit({"n": n, "text": "x" * 1_000_000})
        assert numbers() == list(range(300))


@pytest.fixture
def held_lock() -> Iterator[None]:
    Stream("orders").append({"n": 0})
    with session() as holder:
        holder.execute("BEGIN")
        holder.execute(LOCK, ["orders"])
        yield


@pytest.mark.postgres
class TestLockTimeout:
    @pytest.mark.usefixtures("held_lock")
    def test_a_commit_gives_up_and_says_for_what_it_waited(self, settings: object) -> None:
        settings.ECHOMQ = {"LOCK_TIMEOUT": 0.2}  # type: ignore[attr-defined]

        @transaction.atomic
        def write() -> None:
            Stream("bills").append_on_commit({"n": 0})
            Stream("orders").append_on_commit({"n": 1})

        with pytest.raises(OperationalError, match="for stream 'orders'") as caught:
            write()
        text = str(caught.value)
        assert "nothing was written" in text and "200ms" in text and "LOCK_TIMEOUT" in text
        assert not Outbox.objects.exists()
        with pytest.raises(UnknownStream):
            Stream("bills").read()
        assert numbers() == [0]

    def test_the_sessions_own_timeout_stays(self) -> None:
        with connection.cursor() as cursor, transaction.atomic():
            cursor.execute("SET LOCAL lock_timeout = '1234ms'")
            Stream("orders").append_on_commit({"n": 0})
            flush_outbox()
            cursor.execute("SHOW lock_timeout")
            assert cursor.fetchone() == ("1234ms",)


@pytest.mark.postgres
class TestRelay:
    def left_over(self, count: int) -> None:
        for n in range(count):
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                Stream("orders").append_on_commit({"n": n})

    def test_moves_in_order_and_in_portions(self) -> None:
        self.left_over(5)
        assert [Stream("orders").relay(limit=2) for _ in range(4)] == [2, 2, 1, 0]
        assert numbers() == list(range(5))

    @pytest.mark.usefixtures("held_lock")
    def test_somebody_else_holds_the_lock(self) -> None:
        self.left_over(1)
        assert Stream("orders").relay() is None
        assert Outbox.objects.count() == 1 and Record.objects.count() == 1

    def test_many_relays_at_once_move_each_row_once(self) -> None:
        self.left_over(40)

        def relay() -> None:
            while Outbox.objects.exists():
                Stream("orders").relay(limit=3)

        concurrently(*[relay] * 4)
        assert numbers() == list(range(40))
