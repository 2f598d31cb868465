"""What gets slow is done more and more seldom."""

from __future__ import annotations

from echomq_app.core.pace import Pace


def test_it_rests_at_least_so_long_and_longer_after_it_took_long() -> None:
    now = [100.0]
    pace = Pace(0.1, clock=lambda: now[0])
    assert pace.due()
    pace.took(0.2, least=10.0)
    now[0] = 109.9
    assert not pace.due()
    now[0] = 110.0
    assert pace.due()
    pace.took(3.0, least=10.0)
    now[0] = 139.9
    assert not pace.due()
    now[0] = 140.0
    assert pace.due()


def test_it_may_be_asked_for() -> None:
    pace = Pace(0.1, clock=lambda: 0.0)
    pace.took(1.0, least=1.0)
    assert not pace.due()
    pace.soon()
    assert pace.due()
