"""`dedupe.Seen`, and the clock that waits for its process."""

from __future__ import annotations

import time

import pytest

from echomq_app.dedupe import Seen
from echomq_app.exceptions import InvalidArgument
from echomq_app.layers import clock as clocks
from echomq_app.layers.clock import PatientClock


def test_the_second_time_is_not_the_first() -> None:
    seen = Seen()
    assert [seen.first(id) for id in ("a", ("n", 1), "a", ("n", 1))] == [True, True, False, False]
    assert "a" in seen
    assert "b" not in seen


def test_the_oldest_ids_are_forgotten_beyond_max_size() -> None:
    seen = Seen(max_size=3)
    for number in range(5):
        assert seen.first(number)
    assert len(seen) == 3
    assert not seen.first(4)
    assert seen.first(0)


def test_ids_are_forgotten_after_their_time_and_a_repeat_does_not_prolong_it() -> None:
    now = [0.0]
    seen = Seen(ttl=10, clock=lambda: now[0])
    seen.first("a")
    now[0] = 9.0
    assert not seen.first("a")
    now[0] = 10.0
    assert "a" not in seen
    assert seen.first("a")


def test_an_id_whose_handling_failed_can_be_given_back() -> None:
    seen = Seen()
    seen.first("a")
    seen.forget("a")
    seen.forget("a")
    assert seen.first("a")


@pytest.mark.parametrize("wrong", [{"max_size": 0}, {"ttl": 0}, {"ttl": -1.0}])
def test_limits_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument, match="has to be"):
        Seen(**wrong)  # type: ignore[arg-type]


def test_the_clock_hardly_runs_while_the_process_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    real = [100.0]
    monkeypatch.setattr(clocks, "time", type("Time", (), {"monotonic": lambda: real[0]}))
    clock = PatientClock(0.1)
    for _ in range(10):
        real[0] += 0.1
        clock.tick()
    assert clock.now() == pytest.approx(1.0)
    real[0] += 3600  # stopped for an hour
    assert clock.now() == pytest.approx(1.3)
    assert clock.tick() == pytest.approx(1.3)
    real[0] += 0.1
    assert clock.tick() == pytest.approx(1.4)


def test_the_clock_is_fine_enough_between_two_ticks() -> None:
    clock = PatientClock(10.0)
    before = clock.now()
    time.sleep(0.002)
    assert clock.now() > before
