"""Wait for a condition with a deadline, instead of sleeping and hoping."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import TypeVar, overload

T = TypeVar("T")

POLL = 0.01
PATIENCE = 30.0
"""Seconds. Only a failure takes as long; a machine that others share stalls for ten."""


class TimedOut(AssertionError):
    """The condition did not come true in time."""


def wait_until(
    condition: Callable[[], T], timeout: float = PATIENCE, message: str = "", *, poll: float = POLL
) -> T:
    """Call `condition` until it returns something true, and return that.

    `timeout` in seconds; then `TimedOut`, with `message` and the last value. What
    the condition raises comes through at once.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() > deadline  # before the call: a slow machine gets its last try
        value = condition()
        if value:
            return value
        if late:
            raise _timed_out(condition, timeout, message, value)
        time.sleep(poll)


@overload
async def wait_until_async(
    condition: Callable[[], Awaitable[T]],
    timeout: float = ...,
    message: str = ...,
    *,
    poll: float = ...,
) -> T: ...
@overload
async def wait_until_async(
    condition: Callable[[], T], timeout: float = ..., message: str = ..., *, poll: float = ...
) -> T: ...
async def wait_until_async(
    condition: Callable[[], object],
    timeout: float = PATIENCE,
    message: str = "",
    *,
    poll: float = POLL,
) -> object:
    """Do as `wait_until`, on the event loop; the condition may be a coroutine function."""
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() > deadline
        value = condition()
        if isawaitable(value):
            value = await value
        if value:
            return value
        if late:
            raise _timed_out(condition, timeout, message, value)
        await asyncio.sleep(poll)


def _timed_out(condition: object, timeout: float, message: str, value: object) -> TimedOut:
    what = message or getattr(condition, "__qualname__", repr(condition))
    return TimedOut(f"waited {timeout:g} s for: {what} (last value: {value!r})")
