"""A reader that waits looks into the outbox now and then, not with every read."""

from __future__ import annotations

from echomq_app.core.records import Page
from echomq_app.following import Cursor, Follower

EPOCH = "e" * 16
NOTHING = Page(
    records=[], cursor=0, token=f"{EPOCH}-0", first_position=0, write_cursor=0, epoch=EPOCH
)


def test_the_outbox_is_looked_at_as_often_as_it_is_polled() -> None:
    now = [1000.0]
    asked: list[bool] = []
    waiting = [3]

    def read(cursor: Cursor, with_pending: bool) -> tuple[Page, bool]:
        asked.append(with_pending)
        return NOTHING, with_pending and waiting[0] > 0

    def relay() -> int:
        waiting[0] -= 1
        return 1

    follower = Follower(read, relay, None, clock=lambda: now[0])
    follower.step()
    assert asked == [True, False]  # it has relayed, and read what that brought
    follower.step()
    follower.step()  # as long as something comes
    assert asked == [True, False] * 3
    follower.step()
    follower.step()  # woken, for something else
    assert asked[6:] == [True, False]
    now[0] += 1.0
    follower.step()
    assert asked[8:] == [True]


def test_a_look_that_takes_long_comes_more_seldom() -> None:
    now = [1000.0]
    asked: list[bool] = []

    def read(cursor: Cursor, with_pending: bool) -> tuple[Page, bool]:
        asked.append(with_pending)
        now[0] += 2.0 if with_pending else 0.0
        return NOTHING, False

    follower = Follower(read, lambda: 0, None, clock=lambda: now[0])
    for _ in range(50):
        follower.step()
        now[0] += 1.0
    assert asked.count(True) == 2
