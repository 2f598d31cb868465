"""The layer's protocol, scenario by scenario, on a simulated network."""

from __future__ import annotations

import msgspec
import psutil
import pytest

from echomq_app.core.echo import frames
from echomq_app.core.echo.effects import (
    Broadcast,
    Effect,
    Happened,
    Notify,
    Send,
    SendBatch,
)
from echomq_app.core.echo.frames import Hello
from echomq_app.core.echo.node import EchoNode
from echomq_app.core.echo.peers import Rules
from echomq_app.core.echo.producer import Producer
from echomq_app.core.echo.receiver import Notice
from tests.echo_simulation import Simulation


def pair(**rules: object) -> Simulation:
    """Return two nodes, `a` and `b`, that know each other."""
    sim = Simulation(1, **rules)
    sim.start("a")
    sim.start("b")
    sim.run(1)
    return sim


def positions(*numbers: int) -> list[tuple[int, int]]:
    return [(0, number) for number in numbers]


def happened(sim: Simulation, what: str) -> list[dict[str, object]]:
    return [
        dict(effect.details)
        for _, _, effect in sim.events
        if isinstance(effect, Happened) and effect.what == what
    ]


# The seed's scenarios.


def test_a_node_that_joins_mid_stream_gets_no_history_and_no_notice() -> None:
    sim = Simulation(1)
    sim.start("a")
    sim.write("a", 5)
    sim.run(5)
    sim.start("b", subscribers=0)
    sim.run(1)
    sim.join("b")
    sim.write("a", 2)
    sim.settle()
    assert sim.heard("b") == positions(5, 6)


def test_who_joined_before_its_node_had_met_a_busy_one_is_told() -> None:
    sim = Simulation(1)
    sim.start("a")
    sim.write("a", 5)
    sim.run(5)
    sim.start("b", subscribers=1)  # it joins before the first hello has come
    sim.write("a", 2)
    sim.settle()
    sim.check()
    assert sim.heard("b")[0] == "a"


def test_a_blip_is_replayed_in_order() -> None:
    sim = pair()
    sim.write("a")
    sim.run(1)
    sim.cut_line("a", "b")
    sim.write("a", 2)
    sim.run(3)
    assert sim.heard("b") == positions(0)
    sim.heal()
    sim.write("a")
    sim.settle()
    assert sim.heard("b") == positions(0, 1, 2, 3)
    assert happened(sim, "sync_failure")


@pytest.mark.parametrize("away", [1.0, 30.0])
def test_a_node_too_far_behind_is_told_once_and_then_gets_what_follows(away: float) -> None:
    sim = pair(buffer_size=4)
    sim.write("a", 3)
    sim.run(1)
    sim.cut_line("a", "b")
    sim.write("a", 5)  # the worked example: one more than the ring holds
    sim.run(away)
    sim.heal()
    sim.run(10)
    sim.write("a")
    sim.settle()
    sim.check()
    assert [item for item in sim.heard("b") if isinstance(item, str)].count("a") <= 2
    assert sim.heard("b")[:4] == [*positions(0, 1, 2), "a"]
    assert sim.heard("b")[-1] == (0, 8)


def test_the_expiry_is_signalled_with_what_was_missed() -> None:
    sim = pair(buffer_size=4)
    sim.cut_line("a", "b")
    sim.write("a", 5)
    sim.run(1)
    assert happened(sim, "buffer_expired") == [{"node": "b", "index": 0, "missed": 5}]


def test_a_peer_that_rejects_for_a_while_gets_the_notice_before_any_later_record() -> None:
    # It stays a member: its hellos arrive, and batches to it don't.
    sim = pair(buffer_size=10)
    sim.cut_line("a", "b", both=False)
    for _ in range(12):
        sim.write("a")
        sim.run(0.2)
    sim.heal()
    sim.settle()
    assert sim.heard("b")[0] == "a"
    sim.check()


def test_several_rejections_and_then_acceptance_bring_all_in_order() -> None:
    sim = pair()
    for _ in range(4):
        sim.cut_line("a", "b", both=False)
        sim.write("a", 3)
        sim.run(0.9)
    sim.heal()
    sim.settle()
    assert sim.heard("b") == positions(*range(12))


def test_a_lost_ack_brings_nothing_twice() -> None:
    sim = pair()
    sim.cut_line("b", "a", both=False)
    sim.write("a", 3)
    sim.run(3)
    assert sim.heard("b") == positions(0, 1, 2)
    sim.heal()
    sim.write("a")
    sim.settle()
    assert sim.heard("b") == positions(0, 1, 2, 3)


def test_a_producer_that_restarts_without_bye_is_told_of_at_once() -> None:
    sim = pair()
    sim.write("a", 2)
    sim.run(1)
    sim.kill("a")
    sim.start("a")
    sim.run(0.5)
    assert sim.heard("b") == [*positions(0, 1), "a"]
    sim.write("a")
    sim.settle()
    assert sim.heard("b") == [*positions(0, 1), "a", *positions(0)]


def test_a_producer_that_dies_for_good_is_told_of_when_it_is_given_up() -> None:
    sim = pair()
    sim.kill("a")
    sim.run(5)
    assert sim.heard("b") == []
    sim.run(5)
    assert sim.heard("b") == ["a"]
    sim.run(60)
    assert sim.heard("b") == ["a"]


def test_a_rolling_restart_with_bye_is_silent() -> None:
    sim = pair()
    sim.start("c")
    sim.run(1)
    for name in ("a", "b", "c"):
        sim.write(name, 7)
        sim.leave(name)
        sim.run(1)
        sim.start(name)
        sim.run(1)
    sim.write("a", 1)
    sim.settle()
    sim.check()
    assert not [item for one in sim.subscribers for item in one.heard if isinstance(item, str)]


def test_a_bye_with_undelivered_records_is_no_silence() -> None:
    sim = pair()
    sim.cut_line("a", "b", both=False)
    sim.write("a", 3)
    sim.run(0.3)
    machine = sim.machines["a"]
    sim.heal()
    sim._do(machine, machine.node.bye())
    sim.kill("a")
    sim.settle()
    assert sim.heard("b") == ["a"]


def test_a_command_that_sends_one_message_and_exits_loses_nothing_and_alarms_nobody() -> None:
    sim = pair()
    sim.start("command", subscribers=0)
    sim.write("command")
    sim.run(0.1)
    sim.leave("command")
    sim.settle()
    assert [sim.heard(name) for name in ("a", "b")] == [positions(0), positions(0)]


def test_a_command_that_writes_before_its_first_hello_loses_nothing() -> None:
    sim = pair()
    sim.start("command", subscribers=0)
    sim.cut_line("command", "a")
    sim.cut_line("command", "b")
    sim.write("command", 3)
    sim.run(2)
    sim.heal()
    sim.settle()
    assert [sim.heard(name) for name in ("a", "b")] == [positions(0, 1, 2)] * 2


@pytest.mark.parametrize("away", [1.0, 5.0, 20.0])
def test_who_missed_a_command_that_came_and_went_is_told(away: float) -> None:
    # b's link is down meanwhile: it never hears of the command, nor the command of b.
    sim = pair()
    for other in ("a", "b", "command"):
        sim.cut_line("b", other)
    sim.start("command", subscribers=0)
    sim.write("command", 3)
    sim.run(0.2)
    sim.leave("command")
    sim.run(away)
    sim.settle()
    assert [item for item in sim.heard("a") if item != "b"] == positions(0, 1, 2)
    # By a's hellos. After forget_after others than a may have gone too, and b knows that.
    told = [item for item in sim.heard("b") if item != "a"]
    assert told == (["command"] if away < 6 else ["b", "command"])


def test_who_began_after_a_command_had_left_is_not_told_of_it() -> None:
    sim = pair()
    sim.start("command", subscribers=0)
    sim.write("command", 3)
    sim.run(0.2)
    sim.leave("command")
    sim.run(0.5)
    sim.start("c")
    sim.settle()
    assert sim.heard("c") == []
    assert sim.heard("b") == positions(0, 1, 2)


def test_a_bye_that_was_lost_is_heard_from_others_and_alarms_nobody() -> None:
    sim = pair()
    sim.start("c")
    sim.run(1)
    sim.write("c", 3)
    sim.run(1)
    sim.cut_line("c", "b")
    sim.leave("c")
    sim.settle()
    assert sim.heard("b") == positions(0, 1, 2)


def test_a_bye_of_one_that_we_never_met_is_told() -> None:
    # Our hello had reached it, its own had not reached us.
    node = EchoNode("b", "b", Rules(), 0.0, lambda: 10.0)
    effects = node.on_frame(frames.Bye(boot="x", name="command", cursors=[0, 2]), 0.0)
    assert [effect.notice for effect in effects if isinstance(effect, Notify)] == [
        Notice(node="command", missed=2)
    ]
    assert node.on_frame(frames.Bye(boot="y", name="command", cursors=[0]), 0.0) == []


def test_a_node_that_was_stopped_for_longer_than_others_remember_is_told() -> None:
    sim = pair()
    sim.freeze("b", 20.0)
    sim.run(25)
    assert "b" in sim.heard("b")


def stranger(*, unknown_to: str) -> Simulation:
    """Return a, b, and x, which has sent something, and is out of reach of some of them."""
    sim = pair()
    for other in unknown_to:
        sim.cut_line("x", other)
    sim.start("x", subscribers=0)
    sim.run(0.3)
    sim.write("x", 3)
    sim.run(0.5)
    return sim


@pytest.mark.parametrize("restarts", [False, True])
def test_who_missed_a_node_that_came_and_died_is_told(restarts: bool) -> None:
    sim = stranger(unknown_to="b")
    sim.kill("x")
    if restarts:  # a takes the new life's word for it, at once; b has never heard of the old one
        sim.start("x", subscribers=0)
        sim.heal()
        sim.run(1.0)
    else:
        sim.run(10)
    assert sim.heard("a") == [*positions(0, 1, 2), "x"]
    assert sim.heard("b") == ["x"]
    sim.run(60)
    assert sim.heard("b") == ["x"]


def test_who_began_after_a_dead_node_was_given_up_is_not_told_of_it() -> None:
    sim = stranger(unknown_to="b")
    sim.kill("x")
    sim.run(10)
    sim.start("c")
    sim.settle()
    assert sim.heard("c") == []


def test_what_died_with_a_node_that_nobody_had_met_is_owed_to_nobody() -> None:
    # No byte of it ever reached another process, so there is nobody who could know.
    sim = stranger(unknown_to="ab")
    sim.kill("x")
    sim.settle()
    sim.check()
    assert (sim.heard("a"), sim.heard("b")) == ([], [])


@pytest.mark.parametrize("ends", ["bye", "crash"])
def test_one_who_could_not_hear_of_an_end_for_long_asks_for_it(ends: str) -> None:
    # a's heartbeats have told of it for as long as they do, and none of them reached b.
    sim = stranger(unknown_to="b")
    sim.cut_line("a", "b", both=False)
    if ends == "bye":
        sim.leave("x")
    else:
        sim.kill("x")
    sim.run(40)
    assert "x" not in sim.heard("b")
    sim.settle(3)
    assert sim.heard("b").count("x") == 1
    sim.settle()
    assert sim.heard("b").count("x") == 1


@pytest.mark.parametrize("met", [False, True])
def test_one_that_was_given_up_too_soon_and_dies_later_is_told_of_again(met: bool) -> None:
    sim = stranger(unknown_to="" if met else "b")
    sim.cut_line("x", "a")
    sim.cut_line("x", "b")
    sim.run(10)
    assert sim.heard("b")[-1] == "x"
    sim.cut -= {("x", "a"), ("a", "x")}  # it is there, for a alone
    sim.join("b")
    sim.run(1)
    sim.write("x")
    sim.run(1)
    assert sim.heard("a")[-1] == (0, 3)
    sim.kill("x")
    sim.settle()
    sim.check()
    assert sim.heard("b").count("x") == 2
    assert sim.heard("b", 1) == ["x"]


# Traps.


def test_a_forgotten_node_that_returns_is_replayed() -> None:
    sim = pair(buffer_size=100)
    sim.write("a", 3)
    sim.run(1)
    sim.cut_line("a", "b")
    sim.write("a", 5)
    sim.run(30)
    assert "node_forgotten" in {effect.what for _, _, effect in sim.events}
    assert not sim.machines["a"].node.producers[0].links
    sim.heal()
    sim.settle()
    sim.check()
    assert [item for item in sim.heard("b") if item != "a"] == positions(*range(8))


def test_a_forgotten_node_that_returns_too_late_is_told() -> None:
    sim = pair(buffer_size=4, forget_after=1000.0)
    sim.cut_line("a", "b")
    sim.write("a", 5)
    sim.run(10)
    assert not sim.machines["a"].node.producers[0].links  # silent, and its lag is too large
    sim.heal()
    sim.run(2)
    sim.write("a", 1)
    sim.settle()
    assert sim.heard("b") == ["a", *positions(5)]


def test_a_backlog_of_1200_in_frames_of_500_arrives_whole() -> None:
    sim = pair(buffer_size=2000, max_batch=500)
    sim.cut_line("a", "b")
    sim.write("a", 1200)
    sim.run(3)
    sim.heal()
    sim.settle()
    assert sim.heard("b") == positions(*range(1200))


def test_an_ack_counts_only_what_was_sent() -> None:
    producer = Producer(2000, 500)
    producer.seat("b", 0)
    for number in range(1200):
        producer.write(("g", str(number).encode()))
    producer.flush()
    due = producer.due("b")
    assert due is not None
    assert (due.base, len(due.records)) == (0, 500)
    assert producer.due("b") is None  # one frame in flight
    assert producer.ack("b", 1200)
    assert producer.links["b"].read == 500


def test_the_notice_and_the_records_after_it_are_one_frame() -> None:
    producer = Producer(4, 500)
    producer.seat("b", 0)
    for number in range(6):
        producer.write(("g", str(number).encode()))
    producer.flush()
    first = producer.due("b")
    assert first is not None
    assert (first.base, first.missed, first.records) == (6, 6, [])
    producer.failed("b")
    for number in range(6, 9):
        producer.write(("g", str(number).encode()))
    producer.flush()
    again = producer.due("b")
    assert again is not None
    # From where it was prepared at first, not from the write cursor of now.
    assert (again.base, [payload for _, payload in again.records]) == (6, [b"6", b"7", b"8"])
    assert producer.ack("b", 9)
    assert producer.due("b") is None


def test_a_busy_producer_ends_its_notices() -> None:
    sim = pair(buffer_size=10, max_batch=5)
    sim.cut_line("a", "b")
    sim.write("a", 50)
    sim.run(1)
    sim.heal()
    for _ in range(100):
        sim.write("a", 2)
        sim.run(0.1)
    sim.settle()
    sim.check()
    assert sim.heard("b").count("a") == 1
    assert sim.heard("b")[-1] == (0, 249)


def test_a_caught_up_node_is_sent_no_empty_batch() -> None:
    producer = Producer(4, 500)
    producer.seat("b", 0)
    producer.flush()
    assert producer.due("b") is None


def test_a_batch_that_is_not_acked_is_cut() -> None:
    producer = Producer(100, 8)
    producer.seat("b", 0)
    for number in range(20):
        producer.write(("g", str(number).encode()))
    producer.flush()
    sizes = []
    for _ in range(5):
        due = producer.due("b")
        assert due is not None
        sizes.append(len(due.records))
        producer.failed("b")
    assert sizes == [8, 4, 2, 1, 1]
    for _ in range(4):
        due = producer.due("b")
        assert due is not None
        sizes.append(len(due.records))
        assert producer.ack("b", due.base + len(due.records))
    assert sizes[5:] == [1, 2, 4, 8]


def test_an_ack_that_comes_late_undoes_the_cut() -> None:
    # The frame arrived whole; it's the way that takes longer than the timeout. Sending one
    # record per round trip, for ever, would be no help.
    producer = Producer(100, 8)
    producer.seat("b", 0)
    for number in range(100):
        producer.write(("g", str(number).encode()))
    producer.flush()
    for _ in range(5):
        due = producer.due("b")
        assert due is not None
        assert len(due.records) == 8
        producer.failed("b")
        producer.ack("b", due.base + 8)


def test_a_frame_has_a_size_in_bytes_too() -> None:
    producer = Producer(100, 500)
    producer.seat("b", 0)
    for size in (400_000, 400_000, 400_000, 3_000_000, 1):
        producer.write(("g", b"x" * size))
    producer.flush()
    sizes = []
    while due := producer.due("b"):
        sizes.append([len(payload) for _, payload in due.records])
        producer.ack("b", due.base + len(due.records))
    assert sizes == [[400_000, 400_000], [400_000], [3_000_000], [1]]


def test_a_partial_partition_shows_on_an_idle_line() -> None:
    # b hears a's heartbeats; what b says doesn't reach a, so a gives it up.
    sim = pair()
    sim.cut_line("b", "a", both=False)
    sim.run(15)
    assert not sim.machines["a"].node.peers
    sim.write("a", 3)
    sim.run(15)
    assert sim.heard("b") == ["a"]
    sim.heal()
    sim.write("a", 1)
    sim.settle()
    sim.check()
    assert sim.heard("b")[-1] == (0, 3)


def test_both_sides_restarted_with_undelivered_writes() -> None:
    sim = pair()
    third = sim.start("c")
    sim.run(1)
    sim.cut_line("a", "b")
    sim.write("a", 3)
    sim.write("b", 3)
    sim.run(0.05)
    sim.kill("a")
    sim.kill("b")
    sim.heal()
    sim.start("a")
    sim.start("b")
    sim.run(1)
    sim.write("a", 1)
    sim.write("b", 1)
    sim.settle()
    sim.check()
    assert third.subscribers[0].heard.count("a") == 1
    assert third.subscribers[0].heard.count("b") == 1


def test_an_idle_line_for_a_minute() -> None:
    sim = pair()
    sim.run(60)
    sim.write("a")
    sim.settle()
    assert sim.heard("b") == positions(0)
    assert not happened(sim, "sync_failure")
    assert not happened(sim, "node_forgotten")


def test_one_slow_node_delays_nobody() -> None:
    sim = pair()
    sim.start("c")
    sim.run(1)
    sim.freeze("c", 30)
    for _ in range(10):
        sim.write("a", 3)
        sim.run(0.2)
    assert sim.heard("b") == positions(*range(30))


def test_one_node_at_a_time_without_concurrent_flush() -> None:
    sim = pair(concurrent_flush=False)
    sim.start("c")
    sim.run(1)
    node = sim.machines["a"].node
    node.write(0, ("0", b"0"))
    batches = [effect for effect in node.flush(sim.now) if isinstance(effect, SendBatch)]
    assert len(batches) == 1
    ack = frames.Ack(boot=batches[0].boot, to=node.boot, index=0, cursor=1)
    following = [effect for effect in node.on_frame(ack, sim.now) if isinstance(effect, SendBatch)]
    assert {batches[0].boot, following[0].boot} == {
        sim.machines[name].node.boot for name in ("b", "c")
    }


def test_nodes_with_different_pool_sizes_hear_each_other_whole() -> None:
    sim = Simulation(1)
    sim.start("a", pool_size=1)
    sim.start("b", pool_size=4)
    sim.run(1)
    for _ in range(5):
        sim.write("a", 10)
        sim.write("b", 10)
        sim.run(0.5)
    sim.settle()
    sim.check()
    assert len(sim.heard("a")) == len(sim.heard("b")) == 50


def test_order_is_per_producer_not_across_the_pool() -> None:
    # Two frames of two producers may overtake each other; each one's records may not.
    sim = Simulation(1)
    sim.start("a", pool_size=2)
    sim.start("b")
    sim.run(1)
    sim.delay = (0.0, 0.4)
    for number in range(60):
        sim.write("a", 1, index=number % 2)
        sim.run(0.1)
    sim.settle()
    heard = [item for item in sim.heard("b") if not isinstance(item, str)]
    for index in (0, 1):
        assert [position for which, position in heard if which == index] == list(range(30))
    assert heard != sorted(heard, key=lambda item: (item[1], item[0]))


def test_two_nodes_that_share_a_name_are_found_out_and_live() -> None:
    sim = Simulation(1)
    sim.start("watcher")
    first = EchoNode("web", "one", Rules(heartbeat_interval=0.5), 0.0, lambda: 0.0)
    second = EchoNode("web", "two", Rules(heartbeat_interval=0.5), 0.0, lambda: 0.0)
    watcher = sim.machines["watcher"].node
    shared = []
    for beat in range(8):
        for node in (first, second):
            hello = node.announce(beat * 0.5)[0]
            assert isinstance(hello, Broadcast)
            shared += [
                effect
                for effect in watcher.on_frame(hello.frame, beat * 0.5)
                if isinstance(effect, Happened) and effect.what == "name_shared"
            ]
    assert len(shared) == 1
    assert {"one", "two"} <= set(watcher.peers)


def test_clocks_that_differ_are_reported_once() -> None:
    watcher, other = (
        EchoNode(name, name, Rules(), 0.0, lambda: 0.0) for name in ("watcher", "other")
    )
    found = []
    for _ in range(3):
        hello = other.announce(1.0, wall=1_000_000.0)[0]
        assert isinstance(hello, Broadcast)
        found += [
            effect
            for effect in watcher.on_frame(hello.frame, 1.0, wall=1_000_070.0)
            if isinstance(effect, Happened) and effect.what == "clock_skew"
        ]
    assert [effect.details for effect in found] == [{"node": "other", "seconds": -70.0}]


def test_what_was_under_way_when_its_sender_said_bye_is_not_heard() -> None:
    node = EchoNode("b", "b", Rules(), 0.0, lambda: 0.0)
    batch = frames.Batch(boot="a", name="a", control="x", index=0, base=0, records=[("g", b"1")])
    assert len(node.on_frame(batch, 0.0)) == 2
    node.on_frame(frames.Bye(boot="a", name="a", cursors=[1]), 0.1)
    assert node.on_frame(batch, 0.2) == []


def test_a_departed_node_costs_nothing_once_it_is_forgotten() -> None:
    sim = pair(buffer_size=10)
    sim.kill("b")
    sim.write("a", 100)
    sim.run(30)
    node = sim.machines["a"].node
    assert not node.peers
    assert not node.producers[0].links
    assert len(node.producers[0].ring) == 10


def test_a_million_messages_for_a_dead_node_cost_no_more_than_a_ring_of_them() -> None:
    node = EchoNode("a", "a", Rules(buffer_size=10_000), 0.0, lambda: 0.0)
    other = EchoNode("b", "b", Rules(), 0.0, lambda: 0.0)
    for hello in other.announce(0.0):
        assert isinstance(hello, Broadcast)
        node.on_frame(msgspec.structs.replace(hello.frame, expected={"a": {0: 0}}), 0.0)
    memory = psutil.Process().memory_info
    for number in range(1_000_000):
        node.write(0, ("g", b"%d" % number))
        if number % 10_000 == 0:
            node.flush(0.0)  # it never answers
        if number == 50_000:
            full = memory().rss
    grown = memory().rss - full
    assert node.producers[0].lag("b") == 1_000_000
    assert grown < 20_000_000  # bytes; kept, they would be 100,000,000


def test_what_a_receiver_remembers_is_bounded_and_forgetting_is_no_amnesty() -> None:
    age = [0.0]
    node = EchoNode("b", "b", Rules(), 0.0, lambda: age[0])
    node.receiver._remembered = 3
    for number in range(10):
        age[0] = float(number)
        boot = f"boot{number}"
        node.receiver.meet(boot, boot, [0], -1.0, float(number))
    assert len(node.receiver.sources) == 3
    # boot0 comes back; it began to write before we forgot it, so it may not start at 0.
    age[0] = 10.0
    notice = node.receiver.meet("boot0", "boot0", [5], 9.5, 10.0)
    assert notice is not None
    assert node.receiver.sources["boot0"].expected == {0: 5}


def test_a_ping_after_a_failure_backs_off_and_an_answer_resends_at_once() -> None:
    sim = pair(forget_after=1000.0)
    sim.freeze("b", 40)
    sim.write("a", 1)
    sim.run(39)
    delays = [entry["delay"] for entry in happened(sim, "retry_scheduled")]
    assert delays == [0.1]  # pings only, from there on
    assert sim.machines["a"].node.peers[sim.machines["b"].node.boot].failures < 20
    sim.run(1.5)
    assert sim.heard("b") == positions(0)


def suspected() -> EchoNode:
    """Return a node whose first batch to b was not acked, at the time 0.5."""
    rules = Rules(call_timeout=0.5, retry_interval=0.2, heartbeat_interval=100.0)
    node = EchoNode("a", "a", rules, 0.0, lambda: 0.0)
    other = EchoNode("b", "b", Rules(), 0.0, lambda: 0.0)
    node.announce(0.0)
    for hello in other.announce(0.0):
        assert isinstance(hello, Broadcast)
        node.on_frame(msgspec.structs.replace(hello.frame, expected={"a": {0: 0}}), 0.0)
    node.write(0, ("g", b"1"))
    assert any(isinstance(effect, SendBatch) for effect in node.flush(0.0))
    assert pings(node.tick(0.5)) == 0
    return node


def pings(effects: list[Effect]) -> int:
    return sum(
        isinstance(effect, Send) and isinstance(effect.frame, Hello) and effect.frame.asks >= 0
        for effect in effects
    )


def test_pings_come_after_a_pause_that_grows_to_five_seconds() -> None:
    node = suspected()
    times = [tenth / 10 for tenth in range(6, 300) if pings(node.tick(tenth / 10))]
    pauses = [round(late - early, 1) for early, late in zip([0.5, *times], times, strict=False)]
    assert pauses[:6] == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0], abs=0.11)
    assert set(pauses[6:]) == {5.0}


def test_after_an_ack_the_pauses_are_short_again() -> None:
    node = suspected()
    for tenth in range(6, 100):
        node.tick(tenth / 10)
    node.on_frame(frames.Ack(boot="b", to="a", index=0, cursor=0), 10.0)  # it lives: once more
    node.on_frame(frames.Ack(boot="b", to="a", index=0, cursor=1), 10.1)
    node.write(0, ("g", b"2"))
    node.flush(10.2)
    failure = [effect for effect in node.tick(10.7) if isinstance(effect, Happened)]
    assert {"node": "b", "delay": 0.2, "attempt": 1} in [effect.details for effect in failure]


def test_a_node_that_comes_back_is_found_by_a_ping_long_before_its_heartbeat() -> None:
    sim = pair(heartbeat_interval=100.0, forget_after=1000.0)
    sim.cut_line("a", "b")
    sim.write("a")
    sim.run(5)
    sim.heal()
    sim.run(6)
    assert sim.heard("b") == positions(0)


def test_a_node_that_hears_nothing_gives_up_nobody() -> None:
    # Not even its own hello comes back, so it is the one that is away.
    sim = pair()
    sim.write("a")
    sim.run(1)
    sim.cut_line("b", "a")
    sim.cut_line("b", "b")
    sim.run(30)
    node = sim.machines["b"].node
    assert sim.heard("b") == positions(0)
    assert set(node.peers) == {sim.machines["a"].node.boot}
    sim.heal()
    sim.run(0.5)
    # It gives the others as long as if they had just begun: all that it has to say is of itself.
    assert sim.heard("b") in (positions(0), [*positions(0), "b"])
    sim.settle()
    assert sim.heard("b") == [*positions(0), "b"]


# Frames.


def test_frames_come_back_as_they_were() -> None:
    for frame in (
        frames.Hello(
            boot="a",
            name="web",
            control="c",
            data="d",
            writing=-1.0,
            clock=1.5,
            cursors=[1, 2**63],
            expected={"b": {0: 5, 3: 7}},
            gone=[("c", "command", [0, 3], 1.5)],
            lost=[("d", "web", 2.5)],
            age=100.0,
            since=40.0,
            asks=3.5,
        ),
        frames.Batch(boot="a", name="n", control="c", index=1, base=2, records=[("g", b"\x80")]),
        frames.Ack(boot="a", to="b", index=0, cursor=5),
        frames.Bye(boot="a", name="web", cursors=[]),
        frames.Direct(boot="a", channel="c!1", message=b"\x80"),
    ):
        assert frames.decode(frames.encode(frame)) == frame


@pytest.mark.parametrize("wire", [b"", b"\x02\x90", b"\x01", b"\x01\xff", b"\x01\x92\xa1q\x01"])
def test_what_is_no_frame_is_refused(wire: bytes) -> None:
    with pytest.raises(frames.FrameRefused):
        frames.decode(wire)


def test_a_frame_for_an_index_that_there_is_not_is_ignored() -> None:
    sim = pair()
    node = sim.machines["a"].node
    boot = sim.machines["b"].node.boot
    for index in (9, -1):
        ack = frames.Ack(boot=boot, to=node.boot, index=index, cursor=1)
        assert [one for one in node.on_frame(ack, sim.now) if not isinstance(one, Send)] == []
    node.write(0, ("0", b"0"))
    hello = sim.machines["b"].node.announce(sim.now)[0]
    assert isinstance(hello, Broadcast)
    node.on_frame(msgspec.structs.replace(hello.frame, expected={node.boot: {-1: 1}}), sim.now)
    assert node.producers[0].lag(boot) == 1
