"""A fleet of real processes, each a node of the layer, and what can break between them.

`Trial` is one test's: it starts a Redis and the processes, lets them send and hear, and at
the end has their written histories judged.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
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
from tests.servers.proxy import Proxy, private_proxy
from tests.wait import wait_until

LONG = hypothesis.settings.get_current_profile_name() == "chaos"
CHOSEN = os.environ.get("ECHOMQ_CHAOS_SEED")
SEEDS = [int(CHOSEN)] if CHOSEN else range(5 if LONG else 1)
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
NAMES = "abc"
KINDS = {CORE: "core", PUBSUB: "pubsub"}
SENDER = re.compile(r'"from": "([^"]+)"')


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

    def stop_for(self, name: str, seconds: float) -> None:
        """Stop a process (SIGSTOP), and let it go on."""
        self._children[name].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self._children[name].send_signal(signal.SIGCONT)

    def knows_the_end_of(self, name: str, command: str, sends: int) -> None:
        """Wait until a process has heard all of a command, or was told that it has not."""
        (path,) = self.folder.glob(f"{name}.*.jsonl")

        def does() -> bool:
            text = path.read_text()
            return f'"told": "{command}"' in text or text.count(f'"from": "{command}.') == sends

        wait_until(does, 60, f"{name} knows of {command}", poll=0.1)

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

    def heard(self) -> Counter[tuple[str, str]]:
        """Return how many messages each process has written down of each."""
        return Counter(
            (path.stem, sender)
            for path in self.folder.glob("*.jsonl")
            for sender in SENDER.findall(path.read_text())
        )

    def goes_on(self, more: int = 50) -> None:
        """Wait until every live process has heard more of every one.

        A node that was given up has to be met again first: one that ends before that can tell
        nobody what it had written.
        """
        before = self.heard()
        alive = [f"{name}.{child.pid}" for name, child in self._children.items() if child.running]
        pairs = list(itertools.product(alive, alive))

        def all_heard() -> bool:
            now = self.heard()
            return all(now[pair] >= before[pair] + more for pair in pairs)

        wait_until(all_heard, 60, "everybody hears more of everybody", poll=0.1)

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


class Trial:
    """One test: a Redis, a fleet, and choices that a seed decides."""

    def __init__(self, folder: Path, server: Redis, backend: str, seed: int) -> None:
        self.server = server
        self.stack = contextlib.ExitStack()
        self.fleet: Fleet
        self._folder = folder
        self._backend = backend
        self._dice = random.Random(seed)

    def begin(self, size: int, *, rate: float = 300.0, **options: Any) -> Fleet:
        """Start so many processes; the first of them sends `rate` messages a second."""
        self._assemble(options)
        for name in NAMES[:size]:
            self.fleet.start(name, self.server.url, rate=rate if name == "a" else 300.0)
        return self._go()

    def begin_behind_a_proxy(self, size: int, **options: Any) -> tuple[Fleet, Proxy]:
        """The same; b's link to Redis goes through a proxy."""
        self._assemble(options)
        proxy = self.stack.enter_context(private_proxy(self.server.port))
        for name in NAMES[:size]:
            far = f"redis://127.0.0.1:{proxy.port}/0"
            self.fleet.start(name, far if name == "b" else self.server.url)
        return self._go(), proxy

    def nap(self, least: float, most: float) -> None:
        """Let it run for a while that the seed decides. The length proves nothing."""
        time.sleep(self._dice.uniform(least, most) * (3 if LONG else 1))

    def end(self, *, least: int) -> dict[str, Life]:
        """Wait until all are well, stop them, and judge: the guarantee was kept."""
        self.fleet.goes_on()
        lives = self.fleet.end()
        broken = judge(lives)
        assert not broken, "\n".join(map(str, broken))
        assert sum(life.messages() for life in lives.values()) >= least
        return lives

    def _assemble(self, options: dict[str, Any]) -> None:
        self.fleet = Fleet(self._folder, self._backend, **options)
        self.stack.callback(self.fleet.close)

    def _go(self) -> Fleet:
        self.fleet.write()
        self.nap(0.2, 0.6)
        return self.fleet


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed {seed}")
def seed(request: pytest.FixtureRequest) -> int:
    """`ECHOMQ_CHAOS_SEED` chooses another one."""
    return int(request.param)


@pytest.fixture(params=[CORE, PUBSUB], ids=KINDS.__getitem__)
def trial(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    make_redis: Callable[..., Redis],
    seed: int,
) -> Iterator[Trial]:
    one = Trial(tmp_path, make_redis(tcp=True), request.param, seed)
    with one.stack:
        yield one


def notices(lives: dict[str, Life], nodes: str = NAMES) -> int:
    return sum(life.notices() for life in lives.values() if life.node in nodes)


def of(lives: dict[str, Life], node: str) -> Life:
    (found,) = [life for life in lives.values() if life.node == node]
    return found
