"""Options of a task: where they come from, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from echomq_app.exceptions import InvalidArgument
from echomq_app.jobs.options import JobOptions, declared, job_options


def test_later_layers_win() -> None:
    options = JobOptions.made_of({"max_attempts": 5, "timeout": 1}, {"timeout": 2.5}, {})
    assert (options.max_attempts, options.timeout, options.backoff) == (5, 2.5, 2.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 0},
        {"max_attempts": 1.5},
        {"max_attempts": True},
        {"max_attempts": None},
        {"backoff": -1},
        {"backoff": "soon"},
        {"backoff_max": float("inf")},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"attempts": 3},
    ],
)
def test_what_makes_no_sense_is_refused_at_import(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        job_options(**wrong)
    with pytest.raises(InvalidArgument):
        JobOptions.made_of(wrong)


def test_decorator_leaves_the_function_as_it_is() -> None:
    @job_options(max_attempts=5)
    @job_options(timeout=3, max_attempts=4)
    def handler() -> int:
        return 1

    assert handler() == 1
    assert declared(handler) == {"max_attempts": 5, "timeout": 3}
    assert declared(test_later_layers_win) == {}


def test_stored_options_come_back() -> None:
    options = JobOptions(max_attempts=9, backoff=0, timeout=5)
    stored = options.to_store()
    assert stored == {"backoff": 0, "timeout": 5}
    assert JobOptions.stored_in(stored) == JobOptions(backoff=0, timeout=5)
    assert JobOptions().to_store() == {}


def test_retry_delay() -> None:
    options = JobOptions(backoff=2, backoff_max=10)
    assert [options.retry_delay(n, lambda: 0.99) for n in (1, 2, 3, 9)] == pytest.approx(
        [1.98, 3.96, 7.92, 9.9]
    )
    assert JobOptions(backoff=0).retry_delay(5) == 0
    assert JobOptions(backoff=5, backoff_max=1).retry_delay(1, lambda: 1.0) == 1
