"""A network of simulated nodes, and a checker of what their subscribers heard.

Only the protocol runs here (`echomq_app.core.echo`): no socket, no thread, no clock. One
seed decides everything: who writes, joins, stops, restarts, which frames are lost,
doubled, delayed and overtaken, and between whom, in which direction, the line is cut.

`check` is the guarantee. A subscriber hears the records of each producer in order and
once, and where one is missing that was written after it joined, a notice that names the
producer's node comes before the first record after the hole.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

from echomq_app.core.echo import frames
from echomq_app.core.echo.effects import Broadcast, Deliver, Effect, Notify, Send, SendBatch
from echomq_app.core.echo.node import EchoNode
from echomq_app.core.echo.peers import Rules

TICK = 0.05


@dataclasses.dataclass(slots=True)
class Subscriber:
    """A channel: when it joined, and what it heard, notices (by node name) and records."""

    since: float
    node: str
    boot: str
    gone: set[str]
    """Who was dead already, and given up on, when it joined."""
    heard: list[tuple[str, int, int] | str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class Machine:
    """A process: a node, its subscribers, and whether it is stopped (SIGSTOP)."""

    node: EchoNode
    subscribers: list[Subscriber]
    alive: bool = True
    frozen_until: float = 0.0
    stopped_for: float = 0.0
    flush_at: float | None = None


class Simulation:
    """Build it, let things happen with `at` and `run`, then `check`."""

    def __init__(self, seed: int, **rules: Any) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.loss = 0.0
        self.doubling = 0.0
        self.delay = (0.001, 0.01)
        self.batch_interval = 0.1
        self.cut: set[tuple[str, str]] = set()
        self.machines: dict[str, Machine] = {}  # by name: the present life
        self.subscribers: list[Subscriber] = []
        self.written: dict[str, list[list[float]]] = {}  # by boot and index: when
        self.names: dict[str, str] = {}
        self.began: dict[str, float] = {}  # by boot
        self.waited: dict[str, dict[str, float]] = {}
        """By boot: until when it counted on hearing of whom."""
        self.events: list[Any] = []
        self.left: set[str] = set()  # boots that said bye or died
        self._rules = {
            "buffer_size": 20,
            "max_batch": 5,
            "call_timeout": 0.5,
            "retry_interval": 0.1,
            "heartbeat_interval": 0.5,
            "forget_after": 6.0,
            **rules,
        }
        self._boots = itertools.count()
        self._order = itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    # What can happen.

    def start(self, name: str, *, subscribers: int = 1, **rules: Any) -> Machine:
        """Start a process; its subscribers join at once."""
        boot = f"{name}#{next(self._boots)}"
        began = self.now
        node = EchoNode(
            name,
            boot,
            Rules(**{**self._rules, **rules}),
            self.now,
            age=lambda: self.now - began,
        )
        machine = Machine(node, [])
        self.machines[name] = machine
        self.names[boot] = name
        self.began[boot] = began
        self.waited[boot] = {}
        self.written[boot] = [[] for _ in node.producers]
        for _ in range(subscribers):
            self.join(name)
        self._do(machine, node.addresses(f"{boot}/control", f"{boot}/data", self.now))
        self.at(self.now + TICK, lambda: self._tick(machine))
        return machine

    def join(self, name: str) -> Subscriber:
        """Let a subscriber join at a node."""
        machine = self.machines[name]
        node = machine.node
        gone = {boot for boot in self.left if not node.receiver.watches(boot)}
        gone &= set(node.receiver.sources) | set(node._lives._lost)
        subscriber = Subscriber(self.now, name, machine.node.boot, gone)
        machine.subscribers.append(subscriber)
        self.subscribers.append(subscriber)
        return subscriber

    def write(self, name: str, count: int = 1, index: int | None = None) -> None:
        """Let a node send `count` messages; local subscribers have them at once."""
        machine = self.machines[name]
        node = machine.node
        for _ in range(count):
            which = self.random.randrange(len(node.producers)) if index is None else index
            times = self.written[node.boot][which]
            position = node.write(which, (f"{which}", f"{len(times)}".encode()))
            assert position == len(times)
            times.append(self.now)
        if machine.flush_at is None:
            machine.flush_at = self.now + self.batch_interval
            self.at(machine.flush_at, lambda: self._flush(machine))

    def kill(self, name: str) -> None:
        """End a process without a word."""
        machine = self.machines.pop(name)
        machine.alive = False
        self.left.add(machine.node.boot)

    def leave(self, name: str, *, patience: float = 2.0) -> None:
        """Let a process end cleanly: drain, at most `patience` seconds, then bye."""
        machine = self.machines[name]
        deadline = self.now + patience
        self._do(machine, machine.node.flush(self.now))

        def end() -> None:
            if not machine.alive:
                return
            if not machine.node.drained() and self.now < deadline:
                self.at(self.now + 0.02, end)
                return
            self._do(machine, machine.node.bye())
            self.kill(name)

        end()

    def freeze(self, name: str, seconds: float) -> None:
        """Stop a process (SIGSTOP) for a while; its clock doesn't run meanwhile."""
        machine = self.machines[name]
        machine.frozen_until = self.now + seconds
        machine.stopped_for += seconds

    def cut_line(self, one: str, other: str, *, both: bool = True) -> None:
        """Lose everything from one to the other."""
        self.cut.add((one, other))
        if both:
            self.cut.add((other, one))

    def heal(self) -> None:
        """Mend all lines."""
        self.cut.clear()

    def at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (when, next(self._order), action))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = end

    # How a process does what the protocol wants.

    def _tick(self, machine: Machine) -> None:
        if machine.alive:
            if self.now >= machine.frozen_until:
                self._do(machine, machine.node.tick(self._clock(machine)))
                self._note(machine)
            self.at(max(self.now, machine.frozen_until) + TICK, lambda: self._tick(machine))

    def _clock(self, machine: Machine) -> float:
        return self.now - machine.stopped_for

    def _flush(self, machine: Machine) -> None:
        if not machine.alive:
            return
        if self.now < machine.frozen_until:
            self.at(machine.frozen_until, lambda: self._flush(machine))
            return
        machine.flush_at = None
        self._do(machine, machine.node.flush(self._clock(machine)))

    def _do(self, machine: Machine, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Broadcast(frame):
                    for other in list(self.machines.values()):
                        self._carry(machine, other.node.boot, frame, lane="control")
                case Send(address, frame):
                    self._carry(machine, address.split("/")[0], frame, lane="control")
                case SendBatch(_, address, batch):
                    self._carry(machine, address.split("/")[0], batch, lane="data")
                case Deliver(records):
                    for subscriber in machine.subscribers:
                        subscriber.heard += [
                            (self._producer, int(group), int(text)) for group, text in records
                        ]
                case Notify(notice):
                    for subscriber in machine.subscribers:
                        subscriber.heard.append(notice.node)
                case _:
                    self.events.append((self.now, machine.node.name, effect))

    def _carry(self, sender: Machine, boot: str, frame: frames.AnyFrame, *, lane: str) -> None:
        name = self.names[boot]
        if (sender.node.name, name) in self.cut or self.random.random() < self.loss:
            return
        wire = frames.encode(frame)
        copies = 2 if self.random.random() < self.doubling else 1
        for _ in range(copies):
            arrival = self.now + self.random.uniform(*self.delay)
            self.at(arrival, lambda: self._arrive(boot, wire))

    def _arrive(self, boot: str, wire: bytes) -> None:
        machine = self.machines.get(self.names[boot])
        if machine is None or machine.node.boot != boot:
            return
        if self.now < machine.frozen_until:  # it waits in the socket, in order
            self.at(machine.frozen_until, lambda: self._arrive(boot, wire))
            return
        frame = frames.decode(wire)
        self._producer = frame.boot
        self._do(machine, machine.node.on_frame(frame, self._clock(machine)))
        self._note(machine)

    def _note(self, machine: Machine) -> None:
        receiver = machine.node.receiver
        counted_on = {boot: self.now for boot in receiver.sources if receiver.watches(boot)}
        self.waited[machine.node.boot].update(counted_on)

    # The guarantee.

    def check(self) -> None:
        """Every subscriber has everything in order, once, or was told before the hole."""
        for subscriber in self.subscribers:
            self._check(subscriber)

    def _check(self, subscriber: Subscriber) -> None:
        due: dict[tuple[str, int], int] = {}
        told: set[str] = set()  # the nodes named since the last record of each
        for item in subscriber.heard:
            if isinstance(item, str):
                # Its own node's name says that it may have missed messages of anybody.
                meant = {
                    boot for boot, name in self.names.items() if item in (name, subscriber.node)
                }
                told |= meant
                due_keys = [key for key in due if key[0] in meant]
                for key in due_keys:
                    due[key] = -due[key] - 1 if due[key] >= 0 else due[key]
                continue
            boot, index, position = item
            key = (boot, index)
            if key in due:
                expected = due[key]
                if expected >= 0:
                    assert position == expected, self._fault(subscriber, item, expected)
                else:
                    assert position >= -expected - 1, self._fault(subscriber, item, expected)
            elif boot not in told:
                times = self.written[boot][index][:position]
                missed = [when for when in times if when > subscriber.since]
                assert not missed, self._fault(subscriber, item, position - len(missed))
            due[key] = position + 1
        subscriber_due = due
        self._check_end(subscriber, subscriber_due, told)

    def _check_end(
        self, subscriber: Subscriber, due: dict[tuple[str, int], int], told: set[str]
    ) -> None:
        """At the end, after calm: nothing is missing at the tail without a word either."""
        machine = self.machines.get(subscriber.node)
        if machine is None or machine.node.boot != subscriber.boot or not self.calm:
            return
        for boot, indexes in self.written.items():
            if boot == subscriber.boot or not self._was_met(
                boot, since=self.began[subscriber.boot]
            ):
                continue
            for index, times in enumerate(indexes):
                if (boot, index) in due:
                    cursor = due[boot, index]
                    assert cursor < 0 or cursor == len(times), (subscriber, boot, index, cursor)
                elif boot not in told | (subscriber.gone & self.left):
                    assert all(when <= subscriber.since for when in times), (subscriber, boot)

    def _was_met(self, boot: str, *, since: float) -> bool:
        """Tell whether anybody who is still there counted on the node since then.

        What nobody else has ever heard of is over with its process.
        """
        return any(
            self.waited[machine.node.boot].get(boot, -1.0) >= since
            for machine in self.machines.values()
        )

    calm = False
    _producer = ""

    def settle(self, seconds: float = 30.0) -> None:
        """Mend everything, let time pass, and look at the tails too."""
        self.heal()
        self.loss = self.doubling = 0.0
        self.delay = (0.001, 0.01)
        self.run(seconds)
        self.calm = True
        for machine in self.machines.values():
            assert machine.node.drained(), machine.node.name

    def heard(self, name: str, which: int = 0) -> list[tuple[int, int] | str]:
        """Return what a subscriber of the node's present life heard, briefly."""
        items = self.machines[name].subscribers[which].heard
        return [item if isinstance(item, str) else item[1:] for item in items]

    def _fault(self, subscriber: Subscriber, item: object, expected: int) -> str:
        return f"{subscriber.node} joined at {subscriber.since:.3f}: {item}, due {expected}"


def chaos(seed: int) -> Simulation:
    """Run everything that can go wrong for a while, by one seed, and let it settle."""
    dice = random.Random(f"chaos {seed}")
    sim = Simulation(
        seed,
        buffer_size=dice.choice([4, 10, 40, 200]),
        max_batch=dice.choice([1, 3, 10]),
        concurrent_flush=dice.random() < 0.8,
    )
    sim.loss = dice.choice([0.0, 0.05, 0.3])
    sim.doubling = dice.choice([0.0, 0.1, 0.5])
    sim.delay = dice.choice([(0.001, 0.01), (0.0, 0.3), (0.1, 1.5)])
    sim.batch_interval = dice.choice([0.0, 0.1])
    names = ["a", "b", "c", "d"][: dice.choice([2, 3, 4])]
    for name in names[: dice.randint(1, len(names))]:
        sim.start(name, pool_size=dice.choice([1, 1, 3]))
    for _ in range(dice.randint(10, 60)):
        _happen(sim, dice, names)
        sim.run(dice.choice([0.0, 0.02, 0.3, 2.0]))
    sim.settle()
    return sim


def _happen(sim: Simulation, dice: random.Random, names: list[str]) -> None:
    name, other = dice.choice(names), dice.choice(names)
    if name not in sim.machines:
        sim.start(name, pool_size=dice.choice([1, 1, 3]))
        return
    roll = dice.random()
    if sim.now < sim.machines[name].frozen_until:
        return  # it can't do anything
    if roll < 0.6:
        sim.write(name, dice.choice([1, 1, 5, 30]))
    elif roll < 0.7:
        sim.join(name)
    elif roll < 0.78:
        sim.cut_line(name, other, both=dice.random() < 0.5)
    elif roll < 0.88:
        sim.heal()
    elif roll < 0.92:
        sim.freeze(name, dice.choice([0.2, 5.0, 20.0]))
    elif roll < 0.96:
        sim.kill(name)
    else:
        sim.leave(name)


def strangers(seed: int) -> Simulation:
    """Let short-lived nodes come, send and go, while lines are cut for long, and settle."""
    dice = random.Random(f"strangers {seed}")
    sim = Simulation(seed, buffer_size=dice.choice([4, 40]), max_batch=3)
    sim.loss = dice.choice([0.0, 0.1])
    residents, guests = ["a", "b", "c"], ["x", "y"]
    for name in residents:
        sim.start(name)
    sim.run(1)
    for _ in range(dice.randint(10, 40)):
        name, other = dice.choice(guests), dice.choice([*residents, *guests])
        roll = dice.random()
        if roll < 0.3:
            one = dice.choice(residents)
            sim.cut_line(one, other, both=dice.random() < 0.7)
        elif roll < 0.4:
            sim.heal()
        elif roll < 0.5:
            sim.join(dice.choice(residents))
        elif name not in sim.machines:
            sim.start(name, subscribers=0)
        elif roll < 0.75:
            sim.write(name, dice.choice([1, 5]))
        elif roll < 0.93:
            sim.kill(name)
        else:
            sim.leave(name, patience=0.5)
        sim.run(dice.choice([0.02, 0.3, 2.0, 8.0]))
    sim.settle()
    return sim
