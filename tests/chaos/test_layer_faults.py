"""Real faults with real processes and a real Redis, judged by their written histories.

Two or three processes send and hear at the same time while something breaks. Short in the
suite, longer by `make chaos`.
"""

from __future__ import annotations

import pytest

from tests.chaos.layer_fleet import (
    ENOUGH,
    LONG,
    TIMEOUT,
    TOO_SMALL,
    Trial,
    notices,
    of,
    seed,
    trial,
)

__all__ = ["seed", "trial"]

sizes = pytest.mark.parametrize("size", [2, 3])
# Of the buffers, which the fault itself doesn't care about, the suite takes one for each
# number of processes; of the seeds, the first.
sizes_and_buffers = pytest.mark.parametrize(
    ("size", "buffer_size"),
    [(2, ENOUGH), (3, TOO_SMALL)] + ([(2, TOO_SMALL), (3, ENOUGH)] if LONG else []),
)


@sizes_and_buffers
def test_redis_restarts_empty_while_messages_flow(
    trial: Trial, size: int, buffer_size: int
) -> None:
    trial.begin(size, rate=5000.0, buffer_size=buffer_size)
    trial.nap(0.2, 0.5)
    trial.server.restart_empty()
    trial.nap(0.5, 1.5)
    lives = trial.end(least=10_000 if buffer_size == ENOUGH else 2000)
    if buffer_size == ENOUGH:
        assert notices(lives) == 0


@sizes_and_buffers
def test_a_process_is_stopped_for_ten_call_timeouts_and_resumed(
    trial: Trial, size: int, buffer_size: int
) -> None:
    fleet = trial.begin(size, buffer_size=buffer_size)
    fleet.stop_for("b", 10 * TIMEOUT)
    lives = trial.end(least=1000)
    assert (notices(lives) == 0) == (buffer_size == ENOUGH)


@sizes
def test_a_process_is_killed_and_starts_again(trial: Trial, size: int) -> None:
    fleet = trial.begin(size)
    fleet.kill("b")
    trial.nap(0.0, 0.5)
    fleet.start("b", trial.server.url).wait_for_output("joined", timeout=40)
    lives = trial.end(least=500)
    assert all(life.notices() >= 1 for life in lives.values() if life.node in "ac")


@sizes
@pytest.mark.parametrize("how", ["cut", "hang"])
def test_the_link_of_one_process_breaks_and_is_mended(trial: Trial, how: str, size: int) -> None:
    if not LONG and (how == "cut") != (size == 2):
        pytest.skip("by make chaos")
    _, proxy = trial.begin_behind_a_proxy(size, buffer_size=ENOUGH)
    getattr(proxy, how)()
    trial.nap(1.0, 2.0)
    proxy.heal()
    assert notices(trial.end(least=500)) == 0


@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")], ids=["to b", "from b"])
def test_a_partial_partition(trial: Trial, way: tuple[str, str]) -> None:
    """One hears the other and isn't heard, for longer than anybody has patience."""
    fleet = trial.begin(3, can_cut=True, buffer_size=TOO_SMALL, forget_after=2.0)
    fleet.cut(way)
    if way == ("b", "a"):
        fleet.says("a", "event=node_forgotten node=b")  # though b hears a
    else:
        trial.nap(2.0, 3.0)
    fleet.cut()
    trial.end(least=1000)


@sizes
def test_both_sides_restart_with_undelivered_writes(trial: Trial, size: int) -> None:
    fleet = trial.begin(size, can_cut=True)
    fleet.cut(("a", "b"), ("b", "a"))
    trial.nap(0.3, 0.6)  # what they write now is in their buffers alone
    fleet.kill("a")
    fleet.kill("b")
    fleet.cut()
    for name in "ab":
        fleet.start(name, trial.server.url)
    for name in "ab":
        fleet.says(name, "joined")
    lives = trial.end(least=300)
    if size == 3:
        assert notices(lives, "c") >= 2


@pytest.mark.parametrize("buffer_size", [ENOUGH, TOO_SMALL])
def test_a_node_that_was_forgotten_returns(trial: Trial, buffer_size: int) -> None:
    fleet = trial.begin(3, can_cut=True, buffer_size=buffer_size, forget_after=2.0)
    fleet.cut(("a", "b"), ("b", "a"))
    fleet.says("a", "event=node_forgotten node=b")
    trial.nap(0.5, 1.0)
    fleet.cut()
    lives = trial.end(least=1000)
    missed = [entry["missed"] for entry in of(lives, "b").heard if entry.get("told") == "a"]
    # It was given up, which says nothing of how many; all is brought if it is still there.
    assert (max(missed) == 0) == (buffer_size == ENOUGH)


def test_a_command_comes_and_goes_while_the_link_of_another_process_hangs(trial: Trial) -> None:
    fleet, proxy = trial.begin_behind_a_proxy(2, buffer_size=ENOUGH)
    proxy.hang()
    command = fleet.start("command", trial.server.url, sends=50)
    assert command.wait(60) == 0, command.output
    proxy.heal()
    fleet.knows_the_end_of("b", "command", sends=50)  # by a's next heartbeat
    lives = trial.end(least=500)
    assert notices(lives, "a") == 0
    heard = sum(entry.get("from", "").startswith("command") for entry in of(lives, "b").heard)
    assert heard == 50 or notices(lives, "b") == 1  # at a hung link it may come to both
