"""What repeated signals mean: one stop, unless a person has enough of waiting."""

from __future__ import annotations

from signal import SIGINT, SIGQUIT, SIGTERM

import pytest

from echomq_app.core.stop_signals import AGAIN, Order, StopSignals

STOP, NOTHING, END = Order.STOP, Order.NOTHING, Order.END
LATER = AGAIN + 0.01


@pytest.mark.parametrize(
    ("received", "orders"),
    [
        ([(SIGTERM, 0), (SIGTERM, 0), (SIGTERM, 60)], [STOP, NOTHING, NOTHING]),
        ([(SIGINT, 0), (SIGINT, 0.1), (SIGTERM, 5)], [STOP, NOTHING, NOTHING]),
        ([(SIGTERM, 0), (SIGINT, 5), (SIGINT, 5.1)], [STOP, NOTHING, NOTHING]),
        ([(SIGINT, 0), (SIGINT, LATER)], [STOP, END]),
        ([(SIGTERM, 0), (SIGINT, 5), (SIGINT, 5 + LATER)], [STOP, NOTHING, END]),
        # From the first one on: who presses it quickly isn't kept waiting.
        ([(SIGINT, at / 10) for at in range(11)], [STOP, *[NOTHING] * 9, END]),
        ([(SIGQUIT, 0)], [END]),
        ([(SIGTERM, 0), (SIGQUIT, 0)], [STOP, END]),
    ],
)
def test_orders(received: list[tuple[int, float]], orders: list[Order]) -> None:
    rule = StopSignals()
    assert [rule.received(number, at) for number, at in received] == orders
    assert rule.stopping
