"""Many writers at once: dense, in commit order, nothing lost or doubled, no deadlock."""

from __future__ import annotations

import contextlib
import random
import threading
from functools import partial

import pytest
from django.db import transaction

from echomq_app.cancel import CancelToken
from echomq_app.exceptions import UnknownStream, WrongExpectedCursor
from echomq_app.models import Record
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Stream, StreamRecord, append_all
from tests.databases import concurrently, in_thread, session, waiting_sessions
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


def follow_to_the_end(stream: Stream) -> list[StreamRecord]:
    seen, stop = [], CancelToken()
    for record in stream.tail(stop=stop):
        seen.append(record)
        if record.type == "end":
            stop.cancel()
    return seen


@pytest.mark.parametrize("verb", ["append", "append_on_commit"])
def test_16_writers_to_a_new_stream_while_a_reader_tails(verb: str) -> None:
    """One in four transactions is rolled back; the reader sees every other once, in order."""
    stream = Stream("new")
    barrier = threading.Barrier(16)

    def write(number: int) -> list[tuple[int, int]]:
        written, chance = [], random.Random(number)
        barrier.wait(30)
        for turn in range(12):
            kept = chance.random() >= 0.25
            with transaction.atomic():
                for part in range(chance.randint(1, 3)):
                    getattr(stream, verb)({"by": number, "turn": turn, "part": part, "kept": kept})
                if kept:
                    written.append((number, turn))
                else:
                    transaction.set_rollback(True)
        return written

    with in_thread(lambda: follow_to_the_end(stream)) as following:
        committed = concurrently(*[lambda n=n: write(n) for n in range(16)])
        stream.append({}, type="end")
        seen = following.result(30)
    assert seen == list(stream.replay())
    assert [record.position for record in seen] == list(range(len(seen)))
    *seen, _ = seen
    assert all(record.data["kept"] for record in seen)
    transactions = [(r.data["by"], r.data["turn"]) for r in seen if r.data["part"] == 0]
    assert sorted(transactions) == sorted(entry for entries in committed for entry in entries)
    for number in range(16):
        own = [(r.data["turn"], r.data["part"]) for r in seen if r.data["by"] == number]
        assert own == sorted(own)


def test_positions_of_one_transaction_follow_each_other() -> None:
    """The lock is held to the commit: nobody's record comes between two of one transaction."""
    stream = Stream("orders")

    def write(number: int) -> None:
        for _ in range(10):
            with transaction.atomic():
                positions = [stream.append({"by": number}).position for _ in range(3)]
            assert positions == list(range(positions[0], positions[0] + 3))

    concurrently(*[lambda n=n: write(n) for n in range(4)])
    assert stream.info().write_cursor == 120


def test_two_streams_in_opposite_orders_do_not_deadlock() -> None:
    barrier = threading.Barrier(2)

    def write(*names: str) -> None:
        for turn in range(30):
            barrier.wait(30)
            append_all({name: [{"data": turn}] for name in names})

    concurrently(lambda: write("A", "B"), lambda: write("B", "A"))
    assert [Stream(name).info().write_cursor for name in "AB"] == [60, 60]


def test_appends_without_an_expected_cursor_never_conflict_with_one_there_is_one_winner() -> None:
    stream, seen = Stream("orders"), set()
    barrier = threading.Barrier(8)

    def claim(number: int) -> int:
        wins = 0
        for turn in range(5):
            barrier.wait(30)
            try:
                stream.append({"by": number}, expected_cursor=turn)
                wins += 1
            except WrongExpectedCursor as error:
                seen.add((turn, error.write_cursor))
        return wins

    assert sum(concurrently(*[lambda n=n: claim(n) for n in range(8)])) == 5
    assert stream.info().write_cursor == 5
    assert seen == {(turn, turn + 1) for turn in range(5)}


def test_one_key_from_many_writers_is_one_record() -> None:
    barrier = threading.Barrier(8)

    def write() -> list[bool]:
        duplicates = []
        for turn in range(5):
            barrier.wait(30)
            receipt = Stream("orders").append({}, idempotency_key=f"k{turn}")
            duplicates.append(receipt.duplicate)
        return duplicates

    outcomes = concurrently(*[write] * 8)
    assert Stream("orders").info().write_cursor == 5
    assert [column.count(False) for column in zip(*outcomes, strict=True)] == [1] * 5


def test_appends_while_the_stream_is_deleted_again_and_again() -> None:
    """Each append lands in one life of the stream or another; no life has a hole."""
    stream, done = Stream("orders"), threading.Event()

    def write() -> int:
        for n in range(60):
            stream.append({"n": n})
        done.set()
        return 60

    def delete() -> int:
        removed = 0
        while not done.is_set():
            with contextlib.suppress(UnknownStream):
                stream.delete()
                removed += 1
        return removed

    concurrently(write, delete)
    known = set(StreamRow.objects.values_list("pk", flat=True))
    assert set(Record.objects.values_list("stream_id", flat=True)) <= known
    if known:
        assert [record.position for record in stream.replay()] == list(
            range(stream.info().write_cursor)
        )


@pytest.mark.postgres
class TestUnrelatedWriters:
    def test_an_open_writing_transaction_elsewhere_freezes_nobody(self) -> None:
        """Also when it has a lower transaction id than all that follows."""
        stream = Stream("orders")
        with session() as idle:
            idle.execute("BEGIN")
            idle.execute("INSERT INTO auth_group (name) VALUES ('idle')")
            idle.execute("""SELECT echomq_append_v1('bills', '[{"data": 1}]')""")
            idle.execute("""SELECT echomq_append_on_commit_v1('orders', '[{"data": "late"}]')""")
            for n in range(3):
                assert stream.append(n).position == n
            assert [record.data for record in stream.replay()] == [0, 1, 2]
            assert stream.read(3).caught_up
            idle.execute("COMMIT")
        assert [record.data for record in stream.read(3).records] == ["late"]

    def test_an_uncommitted_append_is_waited_for_by_writers_and_not_seen_by_readers(self) -> None:
        stream = Stream("orders")
        stream.append(0)
        with session() as other:
            other.execute("BEGIN")
            other.execute("""SELECT echomq_append_v1('orders', '[{"data": 1}]')""")
            with in_thread(lambda: stream.append(2)) as appending:
                wait_until(lambda: waiting_sessions() == 1)
                assert [record.data for record in stream.replay()] == [0]
                other.execute("COMMIT")
                assert appending.result(30).position == 2
        assert [record.data for record in stream.replay()] == [0, 1, 2]

    def test_two_transactions_create_one_stream(self) -> None:
        """The second waits for the first; if that rolls back, it makes the stream itself."""
        for end, position in (("ROLLBACK", 0), ("COMMIT", 1)):
            name = end.lower()
            with session() as first:
                first.execute("BEGIN")
                first.execute("""SELECT echomq_append_v1(%s, '[{"data": 0}]')""", [name])
                with in_thread(partial(Stream(name).append, 1)) as second:
                    wait_until(lambda: waiting_sessions() == 1)
                    first.execute(end)
                    assert second.result(30).position == position
