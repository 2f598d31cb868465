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
        {"unique": ""},
        {"unique": 1},
        {"unique": None},
        {"unique": "x" * 201},
        {"unique": "nul\0"},
        {"unique_for": 0},
        {"unique_for": "1h"},
        {"group": None},
        {"group": "\ud800"},
        {"concurrency": 0},
        {"concurrency": 1.0},
        {"retention": -1},
        {"retention": 5, "unique": True, "unique_for": 10},
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


def test_key_of_a_unique_job() -> None:
    def key(options: JobOptions, *args: Any, **kwargs: Any) -> str:
        return options.unique_key("shop.tasks.pay", {"args": args, "kwargs": kwargs})

    assert key(JobOptions(), 1) == ""
    assert key(JobOptions(unique="order:7"), 1) == key(JobOptions(unique="order:7"), 2)
    by_call = JobOptions(unique=True)
    assert key(by_call, 1, a=1, b=2) == key(by_call, 1, b=2, a=1)
    assert len({key(by_call), key(by_call, 1), key(by_call, "1"), key(by_call, a=1)}) == 4
    assert by_call.unique_key("shop.tasks.ship", {"args": [], "kwargs": {}}) != key(by_call)
    # A text that looks like another one's key is a key of its own.
    assert key(JobOptions(unique=key(by_call, 1)), 1) != key(by_call, 1)


def test_group_and_its_limit() -> None:
    def group(**options: Any) -> tuple[str, int]:
        made = JobOptions(**options)
        return made.group_key("shop.tasks.pay"), made.group_limit

    assert group() == ("", 1)
    assert group(group="customer:7") == ("group:customer:7", 1)
    assert group(group="customer:7", concurrency=3) == ("group:customer:7", 3)
    assert group(concurrency=3) == ("task:shop.tasks.pay", 3)


def test_retry_delay() -> None:
    options = JobOptions(backoff=2, backoff_max=10)
    assert [options.retry_delay(n, lambda: 0.99) for n in (1, 2, 3, 9)] == pytest.approx(
        [1.98, 3.96, 7.92, 9.9]
    )
    assert JobOptions(backoff=0).retry_delay(5) == 0
    assert JobOptions(backoff=5, backoff_max=1).retry_delay(1, lambda: 1.0) == 1
