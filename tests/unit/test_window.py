"""Flow control: how much may be on its way, and what an acknowledgement frees."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from echomq_app.core.window import Window


def test_room_is_what_is_not_on_its_way() -> None:
    window = Window(records=10, bytes=100)
    assert window.room == (10, 100)
    window.sent(4, records=4, bytes=30)
    assert window.room == (6, 70)
    window.sent(10, records=6, bytes=10)
    assert window.room == (0, 0)
    assert window.is_full
    assert not window.acked(3), "half a frame frees nothing"
    assert window.acked(4)
    assert window.room == (4, 90)
    assert not window.acked(4)
    assert window.acked(10)
    assert window.room == (10, 100)


def test_one_record_may_be_larger_than_all_of_it() -> None:
    window = Window(records=10, bytes=100)
    window.sent(1, records=1, bytes=1_000_000)
    assert window.is_full
    window.acked(1)
    assert window.room == (10, 100)


def test_more_than_was_sent_acknowledges_nothing() -> None:
    window = Window(records=10, bytes=100, cursor=5)
    assert not window.acked(5)
    window.sent(7, records=2, bytes=10)
    assert not window.acked(8)
    assert window.room == (8, 90)
    assert window.acked(7)


def test_another_history_begins_empty() -> None:
    window = Window(records=10, bytes=100)
    window.sent(10, records=10, bytes=10)
    window.jumped(3)
    assert window.room == (10, 100)
    assert not window.acked(3)
    window.sent(5, records=2, bytes=10)
    assert not window.acked(10), "of the old history, on its way when this one began"
    assert window.room == (8, 90)


class WindowAgainstAList(RuleBasedStateMachine):
    """A list of what was sent says what is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.window = Window(records=20, bytes=200)
        self.sent: list[tuple[int, int, int]] = []
        self.cursor = 0
        self.acked = 0

    @precondition(lambda self: not self.window.is_full)
    @rule(records=st.integers(0, 8), size=st.integers(1, 80), skipped=st.integers(0, 3))
    def send(self, records: int, size: int, skipped: int) -> None:
        records = min(records, self.window.room[0])
        self.cursor += records + skipped
        self.window.sent(self.cursor, records=records, bytes=size if records else 0)
        if records:
            self.sent.append((self.cursor, records, size))

    @rule(back=st.integers(0, 12))
    def ack(self, back: int) -> None:
        cursor = max(0, self.cursor - back)
        before = len(self._on_its_way())
        freed = self.window.acked(cursor)
        self.acked = max(self.acked, cursor)
        assert freed == (len(self._on_its_way()) < before)

    def _on_its_way(self) -> list[tuple[int, int, int]]:
        return [one for one in self.sent if one[0] > self.acked]

    @invariant()
    def room_is_right(self) -> None:
        records = 20 - sum(one[1] for one in self._on_its_way())
        size = 200 - sum(one[2] for one in self._on_its_way())
        assert self.window.room == ((records, size) if records > 0 and size > 0 else (0, 0))


TestWindowAgainstAList = WindowAgainstAList.TestCase
