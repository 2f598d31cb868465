"""What a worker claims ahead follows the rate at which its handlers begin."""

from __future__ import annotations

import pytest

from echomq_app.core.prefetch import COUNTED_AHEAD, HOLD, MOST, Prefetch


def test_nothing_is_known_at_first() -> None:
    assert Prefetch().ahead(0, 100.0) == 0


def test_as_many_as_begin_in_a_moment() -> None:
    prefetch = Prefetch()
    begun = 0
    for tick in range(20):
        ahead = prefetch.ahead(begun, tick * 0.1)
        begun += 100  # a thousand in a second
    assert ahead == pytest.approx(1_000 * HOLD, rel=0.01)


def test_slow_handlers_have_nothing_ahead_at_once() -> None:
    prefetch = Prefetch()
    prefetch.ahead(0, 0.0)
    assert prefetch.ahead(500, 0.5) > 50
    assert prefetch.ahead(501, 1.5) == 0


def test_two_claims_that_follow_each_other_say_nothing() -> None:
    prefetch = Prefetch()
    prefetch.ahead(0, 0.0)
    before = prefetch.ahead(100, 1.0)
    assert prefetch.ahead(200, 1.001) == before


def test_never_more_than_the_most_and_anew_after_jobs_were_given_back() -> None:
    prefetch = Prefetch()
    prefetch.ahead(0, 0.0)
    for tick in range(1, 20):
        ahead = prefetch.ahead(tick * 100_000, float(tick))
    assert ahead == MOST
    prefetch.forget()
    assert prefetch.ahead(2_000_000, 20.0) == 0


def test_what_is_counted_ahead_begins_in_a_few_milliseconds() -> None:
    prefetch = Prefetch()
    begun = 0
    for tick in range(20):
        prefetch.ahead(begun, tick * 0.1)
        begun += 100  # a thousand in a second
    assert prefetch.counted_ahead() == pytest.approx(1_000 * COUNTED_AHEAD, abs=1)
    prefetch.forget()
    assert prefetch.counted_ahead() == 0


def test_nothing_is_counted_ahead_of_handlers_that_take_a_while() -> None:
    prefetch = Prefetch()
    for tick in range(20):
        prefetch.ahead(2 * tick, tick * 0.1)  # twenty in a second
    assert prefetch.counted_ahead() == 0
