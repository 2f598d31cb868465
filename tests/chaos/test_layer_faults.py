"""Real faults with real processes and a real Redis, judged by their written histories.

Two or three processes send and hear at the same time while something breaks. Short in the
suite, longer by `make chaos`.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from project.children import Child
from tests.layer_history import Life, judge, read
from tests.layer_node import HUB
from tests.layer_transport import transport
from tests.layers import CORE, PUBSUB, ROOT
from tests.servers import Redis
from tests.servers.proxy import private_proxy
from tests.wait import wait_until

LONG = hypothesis.settings.get_current_profile_name() == "chaos"
TIMEOUT = 0.3
OPTIONS = {
    "batch_interval": 0.02,
    "call_timeout": TIMEOUT,
    "retry_interval": 0.05,
    "heartbeat_interval": 0.25,
    "forget_after": 30.0,
}
ENOUGH, TOO_SMALL = 20_000, 300
"""Buffers: for all that is sent while somebody is away, or far from it."""
transports = pytest.mark.parametrize("backend", [CORE, PUBSUB])
sizes = pytest.mark.parametrize("size", [2, 3])
# Of the buffers, which the fault itself doesn't care about, the suite takes one for each
# number of processes; of the seeds, the first.
sizes_and_buffers = pytest.mark.parametrize(
    ("size", "buffer_size"),
    [(2, ENOUGH), (3, TOO_SMALL)] + ([(2, TOO_SMALL), (3, ENOUGH)] if LONG else []),
)
rounds = pytest.mark.parametrize("seed", range(5 if LONG else 1))
NAMES = "abc"
KINDS = {CORE: "core", PUBSUB: "pubsub"}


class Fleet:
    """Processes of `tests.layer_node` that share a folder.

    With `can_cut`, what one of them sends to another can be lost on its way.
    """

    def __init__(
        self, folder: Path, backend: str, *, can_cut: bool = False, **options: Any
    ) -> None:
        self.folder = folder
        self._backend = backend
        self._can_cut = can_cut
        self._options = {**OPTIONS, **options}
        self._children: dict[str, Child] = {}
        self._lives = 0
        self._stack = contextlib.ExitStack()

    def start(self, name: str, url: str, *, rate: float = 300.0, sends: int = 0) -> Child:
        self._lives += 1
        way: dict[str, Any] = {"BACKEND": self._backend, "CONFIG": {"hosts": [url]}}
        if self._can_cut:
            way = transport(KINDS[self._backend], HUB, name, url)
        way["CONFIG"]["capacity"] = 1000
        config = {
            "name": name,
            "folder": str(self.folder),
            "rate": rate,
            "options": self._options,
            "transport": way,
            "sends": sends,
        }
        child = Child(
            [sys.executable, "-m", "tests.layer_node", json.dumps(config)],
            cwd=ROOT,
            log=self.folder / f"{name}.{self._lives}.log",
            name=name,
        )
        self._stack.callback(child.stop, grace=1.0)
        self._children[name] = child
        return child

    def kill(self, name: str) -> None:
        self._children[name].kill()

    def cut(self, *ways: tuple[str, str]) -> None:
        """Lose what is on these ways, from one to the other, until the next call."""
        draft = self.folder / "draft"
        draft.write_text(json.dumps(ways))
        draft.rename(self.folder / "cut")

    def says(self, name: str, pattern: str) -> None:
        """Wait until a process has said this."""
        self._children[name].wait_for_output(pattern, timeout=60)

    def write(self) -> None:
        """Let everybody send, once everybody is there."""
        for child in self._children.values():
            child.wait_for_output("joined", timeout=40)
        (self.folder / "write").touch()

    def pause(self) -> None:
        (self.folder / "write").unlink()

    def heard(self) -> dict[str, int]:
        """Return how many messages each process has written down."""
        return {path.stem: path.read_text().count('"n"') for path in self.folder.glob("*.jsonl")}

    def goes_on(self, more: int = 100) -> None:
        """Wait until every live process has heard more than now."""
        before = self.heard()
        alive = [f"{name}.{child.pid}" for name, child in self._children.items() if child.running]

        def all_heard() -> bool:
            now = self.heard()
            return all(now[life] >= before.get(life, 0) + more for life in alive)

        wait_until(all_heard, 60, "everybody hears more", poll=0.1)

    def end(self) -> dict[str, Life]:
        """Stop writing, let everybody drain and leave, and return the histories."""
        self.pause()
        (self.folder / "end").touch()
        for child in self._children.values():
            child.wait_for_output("drained", timeout=60)
        (self.folder / "bye").touch()
        for child in self._children.values():
            assert child.wait(30) == 0, child.output
        return read(self.folder)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def make_fleet(tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    with contextlib.ExitStack() as stack:

        def make(backend: str, **options: Any) -> Fleet:
            fleet = Fleet(tmp_path, backend, **options)
            stack.callback(fleet.close)
            return fleet

        yield make


def nap(seed: int, least: float, most: float) -> None:
    """Let it run for a while that the seed decides. The length proves nothing."""
    time.sleep(random.Random(seed).uniform(least, most) * (3 if LONG else 1))


def kept(lives: dict[str, Life], *, least: int) -> None:
    assert judge(lives) == []
    assert sum(life.messages() for life in lives.values()) >= least


def notices(lives: dict[str, Life], nodes: str = NAMES) -> int:
    return sum(life.notices() for life in lives.values() if life.node in nodes)


def of(lives: dict[str, Life], node: str) -> Life:
    (found,) = [life for life in lives.values() if life.node == node]
    return found


@rounds
@sizes_and_buffers
@transports
def test_redis_restarts_empty_while_messages_flow(
    make_fleet: Callable[..., Fleet],
    make_redis: Callable[..., Redis],
    backend: str,
    size: int,
    buffer_size: int,
    seed: int,
) -> None:
    server = make_redis(tcp=True)
    fleet = make_fleet(backend, buffer_size=buffer_size)
    fleet.start("a", server.url, rate=5000.0)
    for name in NAMES[1:size]:
        fleet.start(name, server.url)
    fleet.write()
    nap(seed, 0.5, 1.0)
    server.restart_empty()
    nap(seed, 0.5, 1.5)
    fleet.goes_on()
    lives = fleet.end()
    kept(lives, least=10_000 if buffer_size == ENOUGH else 2000)
    if buffer_size == ENOUGH:
        assert notices(lives) == 0


@rounds
@sizes_and_buffers
@transports
def test_a_process_is_stopped_for_ten_call_timeouts_and_resumed(
    make_fleet: Callable[..., Fleet],
    make_redis: Callable[..., Redis],
    backend: str,
    size: int,
    buffer_size: int,
    seed: int,
) -> None:
    server = make_redis(tcp=True)
    fleet = make_fleet(backend, buffer_size=buffer_size)
    children = [fleet.start(name, server.url) for name in NAMES[:size]]
    fleet.write()
    nap(seed, 0.2, 0.6)
    children[1].send_signal(signal.SIGSTOP)
    time.sleep(10 * TIMEOUT)
    children[1].send_signal(signal.SIGCONT)
    fleet.goes_on()
    lives = fleet.end()
    kept(lives, least=1000)
    assert (notices(lives) == 0) == (buffer_size == ENOUGH)


@rounds
@sizes
@transports
def test_a_process_is_killed_and_starts_again(
    make_fleet: Callable[..., Fleet],
    make_redis: Callable[..., Redis],
    backend: str,
    size: int,
    seed: int,
) -> None:
    server = make_redis(tcp=True)
    fleet = make_fleet(backend)
    for name in NAMES[:size]:
        fleet.start(name, server.url)
    fleet.write()
    nap(seed, 0.2, 0.6)
    fleet.kill("b")
    nap(seed + 1, 0.0, 0.5)
    fleet.start("b", server.url).wait_for_output("joined", timeout=40)
    fleet.goes_on()
    lives = fleet.end()
    kept(lives, least=500)
    assert all(life.notices() >= 1 for life in lives.values() if life.node in "ac")


@rounds
@sizes
@pytest.mark.parametrize("how", ["cut", "hang"])
@transports
def test_the_link_of_one_process_breaks_and_is_mended(
    make_fleet: Callable[..., Fleet],
    make_redis: Callable[..., Redis],
    backend: str,
    how: str,
    size: int,
    seed: int,
) -> None:
    if not LONG and (how == "cut") != (size == 2):
        pytest.skip("by make chaos")
    server = make_redis(tcp=True)
    with private_proxy(server.port) as proxy:
        fleet = make_fleet(backend, buffer_size=ENOUGH)
        fleet.start("a", server.url)
        fleet.start("b", f"redis://127.0.0.1:{proxy.port}/0")
        for name in NAMES[2:size]:
            fleet.start(name, server.url)
        fleet.write()
        nap(seed, 0.2, 0.6)
        getattr(proxy, how)()
        nap(seed, 1.0, 2.0)
        proxy.heal()
        fleet.goes_on()
        lives = fleet.end()
    kept(lives, least=500)
    assert notices(lives) == 0


@rounds
@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")], ids=["to b", "from b"])
@transports
def test_a_partial_partition(
    make_fleet: Callable[..., Fleet],
    make_redis: Callable[..., Redis],
    backend: str,
    way: tuple[str, str],
    seed: int,
) -> None:
    """One hears the other and isn't heard, for longer than anybody has patience."""
    server = make_redis(tcp=True)
    fleet = make_fleet(backend, can_cut=True, buffer_size=TOO_SMALL, forget_after=2.0)
    for name in NAMES:
        fleet.start(name, server.url)
    fleet.write()
    nap(seed, 0.2, 0.6)
    fleet.cut(way)
    if way == ("b", "a"):
        fleet.says("a", "event=node_forgotten node=b")  # though b hears a
    else:
        nap(seed, 2.0, 3.0)
    fleet.cut()
    fleet.goes_on()
    lives = fleet.end()
    kept(lives, least=1000)


@rounds
@sizes
@transports
def test_both_sides_restart_with_undelivered_writes(
    make_fleet: Callable[..., Fleet],
    make_redis: Callable[..., Redis],
    backend: str,
    size: int,
    seed: int,
) -> None:
    server = make_redis(tcp=True)
    fleet = make_fleet(backend, can_cut=True)
    for name in NAMES[:size]:
        fleet.start(name, server.url)
    fleet.write()
    nap(seed, 0.2, 0.6)
    fleet.cut(("a", "b"), ("b", "a"))
    nap(seed, 0.3, 0.6)  # what they write now is in their buffers alone
    fleet.kill("a")
    fleet.kill("b")
    fleet.cut()
    for name in "ab":
        fleet.start(name, server.url)
    for name in "ab":
        fleet.says(name, "joined")
    fleet.goes_on()
    lives = fleet.end()
    kept(lives, least=300)
    if size == 3:
        assert notices(lives, "c") >= 2


@rounds
@pytest.mark.parametrize("buffer_size", [ENOUGH, TOO_SMALL])
@transports
def test_a_node_that_was_forgotten_returns(
    make_fleet: Callable[..., Fleet],
    make_redis: Callable[..., Redis],
    backend: str,
    buffer_size: int,
    seed: int,
) -> None:
    server = make_redis(tcp=True)
    fleet = make_fleet(backend, can_cut=True, buffer_size=buffer_size, forget_after=2.0)
    for name in NAMES:
        fleet.start(name, server.url)
    fleet.write()
    nap(seed, 0.2, 0.6)
    fleet.cut(("a", "b"), ("b", "a"))
    fleet.says("a", "event=node_forgotten node=b")
    nap(seed, 0.5, 1.0)
    fleet.cut()
    fleet.goes_on()
    lives = fleet.end()
    kept(lives, least=1000)
    missed = [entry["missed"] for entry in of(lives, "b").heard if entry.get("told") == "a"]
    # It was given up, which says nothing of how many; all is brought if it is still there.
    assert (max(missed) == 0) == (buffer_size == ENOUGH)


@rounds
@transports
def test_a_command_comes_and_goes_while_the_link_of_another_process_hangs(
    make_fleet: Callable[..., Fleet],
    make_redis: Callable[..., Redis],
    backend: str,
    seed: int,
) -> None:
    server = make_redis(tcp=True)
    with private_proxy(server.port) as proxy:
        fleet = make_fleet(backend, buffer_size=ENOUGH)
        fleet.start("a", server.url)
        fleet.start("b", f"redis://127.0.0.1:{proxy.port}/0")
        fleet.write()
        nap(seed, 0.2, 0.6)
        proxy.hang()
        command = fleet.start("command", server.url, sends=50)
        assert command.wait(60) == 0, command.output
        proxy.heal()
        fleet.goes_on()
        lives = fleet.end()
    kept(lives, least=500)
    assert notices(lives, "a") == 0
    heard = sum(entry.get("from", "").startswith("command") for entry in of(lives, "b").heard)
    assert heard == 50 or notices(lives, "b") == 1  # at a hung link it may come to both


# The judge.


def life(node: str, sent: int, heard: list[Any], joined_at: float | None = -1.0) -> Life:
    entries = [
        {"told": one} if isinstance(one, str) else {"from": one[0], "n": one[1]} for one in heard
    ]
    times = [float(number) for number in range(sent)]
    return Life(f"{node}.1", node, joined_at, times, entries, ended=True)


@pytest.mark.parametrize(
    ("heard", "faults"),
    [
        ([("a.1", 0), ("a.1", 1), ("a.1", 2)], 0),
        ([("a.1", 0), "a", ("a.1", 2)], 0),
        ([("a.1", 0), "a"], 0),
        ([("a.1", 0), ("a.1", 2)], 1),
        ([("a.1", 0), "b", ("a.1", 2)], 0),  # its own channel was full
        ([("a.1", 0), "c", ("a.1", 2)], 1),
        ([("a.1", 1), ("a.1", 2)], 1),
        ([("a.1", 0), ("a.1", 1), ("a.1", 1), ("a.1", 2)], 1),
        ([("a.1", 0), ("a.1", 1)], 1),
        ([], 1),
    ],
)
def test_the_judge_sees(heard: list[Any], faults: int) -> None:
    lives = {"a.1": life("a", 3, [("a.1", n) for n in range(3)]), "b.1": life("b", 0, heard)}
    assert len(judge(lives)) == faults


def test_the_judge_asks_nothing_of_what_was_sent_before_one_joined() -> None:
    lives = {"a.1": life("a", 3, [("a.1", n) for n in range(3)])}
    lives["b.1"] = life("b", 0, [("a.1", 2)], joined_at=1.5)
    assert judge(lives) == []
