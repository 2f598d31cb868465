"""The ring buffer and the flush decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echomq_app.core.ring import CaughtUp, Decision, Expired, Gap, RingBuffer, decide


def test_the_worked_example_with_a_buffer_of_four() -> None:
    ring: RingBuffer[str] = RingBuffer(4)
    ring.extend(["m0", "m1", "m2"])
    b = 3
    assert (ring.write_cursor, ring.decide(b)) == (3, CaughtUp())

    ring.extend(["m3", "m4"])  # B is away
    assert (ring.write_cursor, ring.decide(b)) == (5, Gap(3, 5))
    assert ring.slice(b) == ["m3", "m4"]

    ring.extend(["m5", "m6", "m7"])
    assert (ring.write_cursor, ring.decide(b)) == (8, Expired(1))
    with pytest.raises(ValueError, match="not between 4 and 8"):
        ring.slice(b)

    b = ring.write_cursor  # told, and seated at the head: not told again
    assert ring.decide(b) == CaughtUp()
    ring.append("m8")
    assert ring.slice(b) == ["m8"]


@pytest.mark.parametrize(
    ("cursor", "expected"),
    [
        (100, CaughtUp()),
        (99, Gap(99, 100)),
        (90, Gap(90, 100)),  # lag == size: the oldest one held is still enough
        (89, Expired(1)),
        (0, Expired(90)),
    ],
)
def test_decisions_at_the_edges(cursor: int, expected: Decision) -> None:
    assert decide(cursor, first=90, write_cursor=100) == expected


def test_a_cursor_from_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match="Cursor 6 is beyond the write cursor 5"):
        decide(6, first=0, write_cursor=5)


@pytest.mark.parametrize("size", [0, -1])
def test_a_ring_without_room_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 item"):
        RingBuffer(size)


def test_a_negative_start_is_refused() -> None:
    with pytest.raises(ValueError, match="start at 0 or above"):
        RingBuffer(4, start=-1)


def test_cursors_far_beyond_64_bits() -> None:
    start = 2**70
    ring: RingBuffer[int] = RingBuffer(4, start=start)
    ring.extend(range(6))
    assert ring.decide(start + 2) == Gap(start + 2, start + 6)
    assert ring.slice(start + 2) == [2, 3, 4, 5]
    assert ring.decide(start) == Expired(2)


@given(size=st.integers(1, 9), start=st.integers(0, 30), written=st.integers(0, 40))
def test_the_seed_states_the_same_decision_by_lag(size: int, start: int, written: int) -> None:
    ring: RingBuffer[int] = RingBuffer(size, start=start)
    ring.extend(range(written))
    held = min(size, written)
    for cursor in range(start, ring.write_cursor + 1):
        lag = ring.write_cursor - cursor
        if lag == 0:
            assert ring.decide(cursor) == CaughtUp()
        elif lag > held:
            assert ring.decide(cursor) == Expired(lag - held)
        else:
            assert ring.decide(cursor) == Gap(cursor, ring.write_cursor)


class RingAgainstAList(RuleBasedStateMachine):
    """A list that forgets nothing says what the ring has to answer."""

    @initialize(size=st.integers(1, 7), start=st.integers(0, 20))
    def begin(self, size: int, start: int) -> None:
        self.ring: RingBuffer[int] = RingBuffer(size, start=start)
        self.size = size
        self.start = start
        self.model: list[int] = []
        self.reader = start

    @rule(item=st.integers())
    def append(self, item: int) -> None:
        assert self.ring.append(item) == self.start + len(self.model)
        self.model.append(item)

    @rule(items=st.lists(st.integers(), max_size=20))
    def extend(self, items: list[int]) -> None:
        assert self.ring.extend(items) == self.start + len(self.model)
        self.model += items

    @rule(limit=st.none() | st.integers(0, 10))
    def read_on(self, limit: int | None) -> None:
        head = self.start + len(self.model)
        missed = max(0, len(self.model) - self.size - (self.reader - self.start))
        match self.ring.decide(self.reader):
            case CaughtUp():
                assert self.reader == head
            case Expired() as expired:
                assert expired.missed == missed > 0
                self.reader = head
            case Gap() as gap:
                assert (missed, gap) == (0, Gap(self.reader, head))
                items = self.ring.slice(gap.start, limit)
                stop = None if limit is None else self.reader - self.start + limit
                assert items == self.model[self.reader - self.start : stop]
                self.reader += len(items)

    @invariant()
    def holds_the_newest(self) -> None:
        ring, model = self.ring, self.model
        assert ring.write_cursor == self.start + len(model)
        assert ring.first == self.start + max(0, len(model) - self.size)
        assert len(ring) == min(len(model), self.size)
        assert ring.slice(ring.first) == model[-self.size :]
        assert ring.slice(ring.write_cursor) == []
        assert len(ring._slots) <= self.size


TestRingAgainstAList = RingAgainstAList.TestCase
