"""How long to wait before trying again: exponential backoff with full jitter.

Full jitter (a uniform draw from zero to the ceiling) spreads clients that failed
together over the whole interval; see Marc Brooker, "Exponential Backoff And Jitter",
AWS Architecture Blog, 2015.
"""

from __future__ import annotations

from collections.abc import Callable

_LARGEST_EXPONENT = 1000  # 2.0 ** 1024 is an OverflowError.


def ceiling(attempt: int, *, base: float, cap: float) -> float:
    """Return the longest delay in seconds before retry `attempt` (the first is 1)."""
    if attempt < 1:
        raise ValueError(f"The first retry is attempt 1, not {attempt}.")
    if not 0 < base <= cap:
        raise ValueError(f"Backoff needs 0 < base <= cap, not base={base} and cap={cap}.")
    return min(cap, base * 2.0 ** min(attempt - 1, _LARGEST_EXPONENT))


def full_jitter(attempt: int, *, base: float, cap: float, random: Callable[[], float]) -> float:
    """Return the delay in seconds before retry `attempt` (the first is 1).

    `random` returns a float in [0, 1), like `random.random`; it is given, so that the
    result can be predicted in a test.
    """
    return random() * ceiling(attempt, base=base, cap=cap)
