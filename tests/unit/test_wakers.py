"""The moment between looking at a flag and waiting for it, made certain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from echomq_app.core.wakers import Wakers


@pytest.fixture
def set_in_between() -> Callable[[], bool]:
    """A flag that another thread sets, and runs the wakers, between the first two looks."""
    answers: Iterator[bool] = iter([False, True, True])
    return lambda: next(answers)


def test_a_thread_does_not_wait_for_what_came_before_it_was_known(
    set_in_between: Callable[[], bool],
) -> None:
    wakers = Wakers()

    assert wakers.wait(set_in_between, 20)
    assert len(wakers) == 0


async def test_a_task_does_not_wait_for_what_came_before_it_was_known(
    set_in_between: Callable[[], bool],
) -> None:
    wakers = Wakers()

    assert await asyncio.wait_for(wakers.wait_async(set_in_between, None), 10)
    assert len(wakers) == 0


async def test_a_wait_with_a_timeout_ends_without_a_wake_up() -> None:
    wakers = Wakers()

    assert not wakers.wait(lambda: False, 0.01)
    assert not await wakers.wait_async(lambda: False, 0.01)
    assert len(wakers) == 0


def test_what_a_callback_adds_is_run_too_and_an_error_stops_nothing() -> None:
    wakers = Wakers()
    ran: list[str] = []

    def first() -> None:
        ran.append("first")
        wakers.add(lambda: ran.append("added"))
        raise RuntimeError("broken")

    wakers.add(lambda: ran.append("oldest"))
    wakers.add(first)
    wakers.run()
    wakers.run()

    assert ran == ["first", "added", "oldest"]
