"""The floor: whatever is committed late is read still, and what is dead is passed by."""

from __future__ import annotations

import dataclasses

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echomq_app.core.floor import MOST, Floor


@dataclasses.dataclass
class Transaction:
    number: int
    ids: list[int] = dataclasses.field(default_factory=list)


class OutboxMachine(RuleBasedStateMachine):
    """Transactions that draw ids and commit in any order; one reader, with a floor."""

    def __init__(self) -> None:
        super().__init__()
        self.floor = Floor()
        self.next_number, self.next_id = 1, 1
        self.open: list[Transaction] = []
        self.waiting: set[int] = set()
        """Committed, and not taken."""

    def number(self) -> int:
        self.next_number += 1
        return self.next_number - 1

    @rule()
    def begin(self) -> None:
        self.open.append(Transaction(self.number()))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9), count=st.integers(1, 3))
    def insert(self, which: int, count: int) -> None:
        for _ in range(count):
            self.open[which % len(self.open)].ids.append(self.next_id)
            self.next_id += 1

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 9), really=st.sampled_from([True, True, False]))
    def end(self, which: int, really: bool) -> None:
        ended = self.open.pop(which % len(self.open))
        self.waiting |= set(ended.ids if really else [])

    @rule(at_most=st.integers(1, 4))
    def read(self, at_most: int) -> None:
        oldest = min([self.next_number, *(one.number for one in self.open)])
        found = sorted(id for id in self.waiting if id > self.floor.value)[:at_most]
        self.waiting -= set(found)
        number = self.number() if found else None
        self.floor.took(found[-1] if found else None, number, oldest)

    @invariant()
    def nothing_that_may_come_is_passed_by(self) -> None:
        coming = self.waiting.union(*(one.ids for one in self.open))
        assert all(id > self.floor.value for id in coming)


TestOutbox = OutboxMachine.TestCase
TestOutbox.settings = settings(max_examples=300, stateful_step_count=50)


def test_it_follows_one_reading_behind() -> None:
    floor = Floor()
    for turn in range(1, 5):
        floor.took(last=10 * turn, transaction=turn, oldest=turn)
    assert floor.value == 30
    floor.took(last=None, transaction=None, oldest=5)
    assert floor.value == 30
    floor.took(last=50, transaction=6, oldest=6)
    assert floor.value == 40


def test_a_transaction_that_stays_open_holds_it_and_costs_little() -> None:
    floor = Floor()
    for turn in range(1, 5_000):
        floor.took(last=turn, transaction=turn, oldest=1)
    assert floor.value == 0 and len(floor._places) == MOST
    for turn in range(5_000, 5_003):
        floor.took(last=turn, transaction=turn, oldest=turn)
    assert floor.value >= 4_999
