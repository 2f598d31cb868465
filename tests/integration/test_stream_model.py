"""The log against a list: any sequence of verbs leaves what a small model says it should."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import connection, transaction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from echomq_app.exceptions import (
    CursorExpired,
    CursorInvalid,
    UnknownStream,
    WrongExpectedCursor,
)
from echomq_app.stream import Receipt, Stream
from tests.log_model import Life

pytestmark = pytest.mark.django_db(transaction=True)

KEYS = st.sampled_from(["", "", "a", "b"])
TYPES = st.sampled_from(["x", "y"])
ONCE = st.sampled_from(["", "", "", "k1", "k2", "k3"])
ITEMS = st.lists(st.tuples(TYPES, KEYS, ONCE), min_size=1, max_size=6)


class LogMachine(RuleBasedStateMachine):
    """Verbs on one stream, each compared with the model at once."""

    places = Bundle("places")

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream("model")
        self.life: Life | None = None
        self.count = 0

    @initialize(target=places)
    def begin(self) -> Any:
        with connection.cursor() as cursor:
            for statement in EMPTY[connection.vendor]:
                cursor.execute(statement)
        return multiple()

    # Writing

    def encode(self, items: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
        records = []
        for type, key, once in items:
            self.count += 1
            records.append(
                {"data": {"n": self.count}, "type": type, "key": key, "idempotency_key": once}
            )
        return records

    def expect(self, records: list[dict[str, Any]]) -> list[tuple[int, bool]]:
        """Append to the model; return (position, duplicate) of each."""
        self.life = self.life or Life()
        return [self.life.append(record) for record in records]

    def check(self, receipts: list[Receipt], places: list[tuple[int, bool]]) -> None:
        assert [(receipt.position, receipt.duplicate) for receipt in receipts] == places

    @rule(target=places, items=ITEMS)
    def append(self, items: list[tuple[str, str, str]]) -> Any:
        records = self.encode(items)
        receipts = self.stream.append_many(records)
        self.check(receipts, self.expect(records))
        return multiple(*(receipt.token for receipt in receipts))

    @rule(items=ITEMS)
    def append_on_commit(self, items: list[tuple[str, str, str]]) -> None:
        records = self.encode(items)
        with transaction.atomic():
            for record in records:
                self.stream.append_many_on_commit([record])
        self.expect(records)

    @rule(items=ITEMS, off_by=st.sampled_from([0, 0, 1, -1, 5]))
    def append_expecting(self, items: list[tuple[str, str, str]], off_by: int) -> None:
        head = len(self.life.entries) if self.life else 0
        expected = max(0, head + off_by)
        records = self.encode(items)
        life, before = self.life, list(self.life.entries) if self.life else []
        places = self.expect(records)
        assert self.life is not None
        fresh = any(not duplicate for _, duplicate in places)
        if expected != head and fresh:
            self.life.entries = before
            self.life = life  # what is refused creates no stream
            with pytest.raises(WrongExpectedCursor) as caught:
                self.stream.append_many(records, expected_cursor=expected)
            assert caught.value.write_cursor == head
        else:
            self.check(self.stream.append_many(records, expected_cursor=expected), places)

    @rule(items=ITEMS, verb=st.sampled_from(["append_many", "append_many_on_commit"]))
    def append_and_roll_back(self, items: list[tuple[str, str, str]], verb: str) -> None:
        with transaction.atomic():
            getattr(self.stream, verb)(self.encode(items))
            transaction.set_rollback(True)

    @rule(first=ITEMS, undone=ITEMS, last=ITEMS)
    def append_around_a_savepoint_that_is_rolled_back(
        self,
        first: list[tuple[str, str, str]],
        undone: list[tuple[str, str, str]],
        last: list[tuple[str, str, str]],
    ) -> None:
        with transaction.atomic():
            records = self.encode(first)
            self.check(self.stream.append_many(records), self.expect(records))
            with transaction.atomic():
                self.stream.append_many(self.encode(undone))
                transaction.set_rollback(True)
            records = self.encode(last)
            self.check(self.stream.append_many(records), self.expect(records))

    # Keeping

    @precondition(lambda self: self.life is not None)
    @rule(keep=st.integers(0, 12))
    def trim(self, keep: int) -> None:
        assert self.life is not None
        target = max(self.life.first, len(self.life.entries) - keep)
        result = self.stream.trim(max_records=keep)
        assert (result.first_position, result.trimmed) == (target, target - self.life.first)
        self.life.first = target

    @precondition(lambda self: self.life is not None)
    @rule()
    def rotate_epoch(self) -> None:
        assert self.life is not None
        self.stream.rotate_epoch()

    @precondition(lambda self: self.life is not None)
    @rule()
    def delete(self) -> None:
        self.stream.delete()
        self.life = None

    # Reading

    @rule(target=places, limit=st.integers(1, 5))
    def read_from_the_oldest(self, limit: int) -> Any:
        if self.life is None:
            with pytest.raises(UnknownStream):
                self.stream.read(limit=limit)
            return multiple()
        page = self.stream.read(limit=limit)
        assert numbers(page.records) == [entry.n for entry in self.life.retained[:limit]]
        return multiple(page.token)

    @rule(cursor=st.integers(0, 60), limit=st.integers(1, 50))
    def read_from_a_number(self, cursor: int, limit: int) -> None:
        self.read(cursor, cursor, limit)

    @rule(place=places, limit=st.integers(1, 50))
    def read_from_an_earlier_token(self, place: str, limit: int) -> None:
        epoch, cursor, _ = place.split(":")
        if self.life is not None and epoch != self.stream.info().epoch:
            assert refusal(self.stream, place) == "epoch"
        else:
            self.read(place, int(cursor), limit)

    def read(self, cursor: int | str, position: int, limit: int) -> None:
        if self.life is None:
            with pytest.raises(UnknownStream):
                self.stream.read(cursor)
        elif position > len(self.life.entries):
            assert refusal(self.stream, cursor) == "ahead"
        elif position < self.life.first:
            with pytest.raises(CursorExpired) as caught:
                self.stream.read(cursor)
            assert caught.value.missed == self.life.first - position
        else:
            page = self.stream.read(cursor, limit=limit)
            wanted = self.life.entries[position : position + limit]
            assert numbers(page.records) == [entry.n for entry in wanted]
            assert page.cursor == position + len(wanted)

    @precondition(lambda self: self.life is not None)
    @rule(types=st.sets(TYPES), key=st.one_of(st.none(), KEYS), limit=st.integers(1, 4))
    def read_all_that_matches(self, types: set[str], key: str | None, limit: int) -> None:
        """Page by page, with a window smaller than the log: each page moves on."""
        assert self.life is not None
        wanted = [
            entry.n
            for entry in self.life.retained
            if entry.type in types and key in (None, entry.key)
        ]
        found: list[int] = []
        page = self.stream.read(limit=limit, types=types, key=key)
        while True:
            found += numbers(page.records)
            assert len(page.records) <= limit
            if page.caught_up:
                break
            before, page = (
                page.cursor,
                self.stream.read(page.token, limit=limit, types=types, key=key),
            )
            assert page.cursor > before
        assert found == wanted
        assert (page.cursor, page.token) == (len(self.life.entries), self.stream.info().token)

    @invariant()
    def the_log_is_the_list(self) -> None:
        if self.life is None:
            with pytest.raises(UnknownStream):
                self.stream.info()
            return
        info = self.stream.info()
        assert (info.first_position, info.write_cursor) == (
            self.life.first,
            len(self.life.entries),
        )
        records = list(self.stream.replay())
        assert [record.position for record in records] == list(
            range(self.life.first, len(self.life.entries))
        )
        assert numbers(records) == [entry.n for entry in self.life.retained]
        assert [record.id for record in records] == sorted(record.id for record in records)
        times = [record.recorded_at for record in records]
        assert times == sorted(times)


EMPTY = {
    "sqlite": [f"DELETE FROM echomq_{table}" for table in ("record", "outbox", "stream")],
    "postgresql": ["TRUNCATE echomq_record, echomq_outbox, echomq_stream RESTART IDENTITY"],
}


def numbers(records: list[Any]) -> list[int]:
    return [record.data["n"] for record in records]


def refusal(stream: Stream, cursor: int | str) -> str:
    with pytest.raises(CursorInvalid) as caught:
        stream.read(cursor)
    return caught.value.reason


@pytest.fixture
def small_window(settings: Any) -> None:
    settings.ECHOMQ = {"FILTER_WINDOW": 5}


@pytest.mark.usefixtures("small_window")
def test_any_sequence_of_verbs() -> None:
    run_state_machine_as_test(
        LogMachine,
        settings=settings(
            stateful_step_count=25, suppress_health_check=list(HealthCheck), print_blob=True
        ),
    )
