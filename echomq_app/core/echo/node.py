"""One node of the channel layer, without I/O: frames and time go in, effects come out.

It joins a receiver, the producers and what they send, and what is known of the other nodes
(its peers): who comes, who goes, who is silent. A peer is one life of a process, named by its
boot id; the node's name is for people, and tells that a new life replaces an old one.

Who is seated where: a hello says what its sender expects from every boot that it knows.
Whoever isn't in the list answers with a hello of its own, so the other side gets to know
it and says what it expects, and only then are batches sent. Three frames at most, and
the receiver alone decides where it begins.

`now` is a clock that only runs while this process does (see `layers.clock`): for
timeouts. `age` gives the real seconds since the node began, which tell who was there
before whom.
"""

from __future__ import annotations

from collections.abc import Callable

from .effects import Broadcast, Deliver, Effect, Happened, Notify, Send
from .frames import Ack, AnyFrame, Batch, Bye, Hello, Record
from .lives import Lives
from .peers import QUIET_BEATS, Peer, Rules
from .receiver import Notice, Receiver
from .sending import Sending

SKEW = 5.0
"""Seconds by which wall clocks may differ before it is reported."""


class EchoNode:
    """The protocol's state of one node. Its owner holds one lock around every call."""

    def __init__(
        self, name: str, boot: str, rules: Rules, now: float, age: Callable[[], float]
    ) -> None:
        self.name = name
        self.boot = boot
        self.rules = rules
        self.data = ""
        self._age = age
        self.sending = Sending(name, boot, rules)
        self.producers = self.sending.producers
        self.peers = self.sending.peers
        self.receiver = Receiver(age)
        self.echo_at: float | None = None
        """When we last heard our own hello."""
        self._heard_at: float | None = None
        """The same, by `age`."""
        self._link_since: float | None = None
        self._wrote_at: float | None = None
        self._next_beat = now
        self._lives = Lives(QUIET_BEATS * rules.heartbeat_interval, rules.forget_after)
        self._skewed: set[str] = set()

    @property
    def control(self) -> str:
        """Where hello, ack and bye for this node should go."""
        return self.sending.control

    # From the local side.

    def write(self, index: int, record: Record) -> int:
        """Keep a record for the other nodes; return its position."""
        if self._wrote_at is None:
            self._wrote_at = self._age()
        return self.sending.write(index, record)

    def flush(self, now: float) -> list[Effect]:
        """Send what was written, to everybody who needs it and has no frame in flight."""
        return self.sending.flush(now)

    def addresses(self, control: str, data: str, now: float, wall: float = 0.0) -> list[Effect]:
        """Hear where this node can be reached from now on, and tell everybody."""
        self.sending.control, self.data = control, data
        return self.announce(now, wall)

    def announce(self, now: float, wall: float = 0.0) -> list[Effect]:
        """Say hello to all."""
        self._next_beat = now + self.rules.heartbeat_interval
        return [Broadcast(self._hello(now, wall))]

    def bye(self) -> list[Effect]:
        """Leave; to be called when `drained()`, or when it is too late to wait for that."""
        frame = Bye(boot=self.boot, name=self.name, cursors=self.sending.cursors())
        return [Send(peer.control, frame) for peer in self.peers.values()]

    def drained(self) -> bool:
        """Tell whether every node that we know has everything, as far as we know."""
        return self.sending.drained()

    def fill(self) -> float:
        """Return how full the fullest buffer is of records that somebody still needs, 0 to 1."""
        return self.sending.fill()

    # From the other nodes.

    def on_frame(self, frame: AnyFrame, now: float, wall: float = 0.0) -> list[Effect]:
        """Take a frame that came in."""
        if frame.boot == self.boot:
            return self._on_echo(now)
        if self._lives.has_ended(frame.boot):
            return []  # It was under way when its sender said goodbye.
        effects: list[Effect] = []
        if isinstance(frame, Hello):
            if self._lives.is_replaced(frame.boot):
                if not self._lives.speaks(frame.boot, now):
                    return []
                details = {"node": frame.name}
                effects.append(Happened("name_shared", details))
            return effects + self._on_hello(frame, now, wall)
        effects += self.sending.heard(frame.boot, now)
        if isinstance(frame, Batch):
            effects += self._on_batch(frame, now)
        elif isinstance(frame, Ack) and frame.to == self.boot:
            effects += self.sending.acked(frame, now)
        elif isinstance(frame, Bye):
            effects += self._on_bye(frame.boot, frame.name, frame.cursors)
        return effects

    def send_failed(self, boot: str, index: int, reason: str, now: float) -> list[Effect]:
        """Hear that a batch could not be sent, or wasn't acked in time."""
        return self.sending.failed(boot, index, reason, now)

    def tick(self, now: float, wall: float = 0.0) -> list[Effect]:
        """Do what is due; to be called several times per `retry_interval`."""
        effects: list[Effect] = []
        self._watch_link(now)
        if now >= self._next_beat:
            effects += self.announce(now, wall)
            effects += self._tell_of_silence(now)
        for boot, peer in list(self.peers.items()):
            effects += self.sending.overdue(boot, now)
            if self.sending.ping_is_due(boot, now):
                source = self.receiver.sources.get(boot)
                asks = 0.0 if source is None else source.witnessed or 0.0
                effects.append(Send(peer.control, self._hello(now, wall, asks=asks)))
            effects += self._forget_if_gone(boot, peer, now)
        return effects + self.sending.pump(self.peers, now)

    # Details.

    def _on_echo(self, now: float) -> list[Effect]:
        self.echo_at = now
        if self._link_since is None:
            self._link_since = now
        heard_at, self._heard_at = self._heard_at, self._age()
        if heard_at is None or self._heard_at - heard_at < self.rules.forget_after:
            return []
        # In real seconds, also of a process that was stopped: nobody remembers any more who
        # came, sent and went meanwhile.
        return [Notify(Notice(node=self.name, missed=0))]

    def _watch_link(self, now: float) -> None:
        longest = QUIET_BEATS * self.rules.heartbeat_interval
        if self.echo_at is None or now - self.echo_at > longest:
            self._link_since = None

    def _tell_of_silence(self, now: float) -> list[Effect]:
        """Tell of nodes that said nothing for too long, as far as we could have heard it."""
        patience = self.rules.forget_after
        if self._link_since is None or now - self._link_since < patience:
            return []
        vanished = self.receiver.vanished(now, patience)
        for boot, notice in vanished.items():
            self._lives.lose(boot, notice.node, self._age())
        notices = [*vanished.values(), *self.receiver.overdue(now, patience)]
        return [Notify(notice) for notice in notices]

    def _on_hello(self, hello: Hello, now: float, wall: float) -> list[Effect]:
        effects = self._replace(hello, now) + self._hear_of(hello)
        peer = self.peers.get(hello.boot)
        is_new = peer is None
        if peer is None:
            peer = Peer(hello.name, hello.control, hello.data, now)
            self.peers[hello.boot] = peer
            effects.append(Happened("node_joined", {"node": hello.name, "nodes": len(self.peers)}))
        peer.control, peer.data = hello.control, hello.data
        notice = self.receiver.meet(hello.boot, hello.name, hello.cursors, hello.writing, now)
        if notice is not None:
            effects.append(Notify(notice))
        ours = hello.expected.get(self.boot)
        if ours is not None:
            self.sending.seat(hello.boot, ours)
        asks = self.receiver.witness(hello.boot, hello.age, hello.since)
        if is_new or ours is None or asks is not None or hello.asks >= 0:
            since = hello.asks if hello.asks >= 0 else None
            answer = self._hello(now, wall, asks=-1.0 if asks is None else asks, since=since)
            effects.append(Send(peer.control, answer))
        effects += self._skew(hello, wall)
        return effects + self.sending.heard(hello.boot, now)

    def _on_batch(self, batch: Batch, now: float) -> list[Effect]:
        notice, records, cursor = self.receiver.take(
            batch.boot, batch.name, batch.index, batch.base, batch.records, now
        )
        effects: list[Effect] = []
        if notice is not None:
            effects.append(Notify(notice))
        if records:
            effects.append(Deliver(records))
        # After the delivery: an ack means that the subscribers have it.
        ack = Ack(boot=self.boot, to=batch.boot, index=batch.index, cursor=cursor)
        return [*effects, Send(batch.control, ack)]

    def _on_bye(self, boot: str, name: str, cursors: list[int], ago: float = 0.0) -> list[Effect]:
        notice = self.receiver.leave(boot, name, cursors)
        self._lives.end(boot, name, cursors, self._age() - ago)
        return [
            *([Notify(notice)] if notice is not None else []),
            *self._forget(boot, "it said bye"),
        ]

    def _hear_of(self, hello: Hello) -> list[Effect]:
        """Take another node's word that somebody has gone, if we don't know ourselves.

        A bye was lost on the way; or somebody came, sent and went while our link was down,
        and neither of us knew of the other.
        """
        effects: list[Effect] = []
        now = self._age()
        for boot, name, cursors, ago in hello.gone:
            is_news = boot != self.boot and not self._lives.has_ended(boot)
            if is_news and ago < now:  # otherwise it was before our time
                effects += self._on_bye(boot, name, cursors, ago)
        for boot, name, ago in hello.lost:
            is_ours = boot == self.boot or self.receiver.watches(boot)
            if not is_ours and ago < now and self._lives.is_news(boot, now - ago):
                self._lives.lose(boot, name, now - ago)
                effects.append(Notify(Notice(node=name, missed=0)))
        return effects

    def _forget_if_gone(self, boot: str, peer: Peer, now: float) -> list[Effect]:
        silence = now - peer.heard
        is_quiet = silence > QUIET_BEATS * self.rules.heartbeat_interval
        if is_quiet and self.sending.is_expired(boot):
            return self._forget(boot, "it is silent, and what it needs is overwritten")
        if self._link_since is None or now - self._link_since < self.rules.forget_after:
            return []
        if silence >= self.rules.forget_after:
            return self._forget(boot, "it is silent")
        return []

    def _forget(self, boot: str, reason: str) -> list[Effect]:
        peer = self.sending.forget(boot)
        self._skewed.discard(boot)
        if peer is None:
            return []
        details = {"node": peer.name, "nodes": len(self.peers), "reason": reason}
        return [Happened("node_forgotten", details)]

    def _replace(self, hello: Hello, now: float) -> list[Effect]:
        """Drop older lives of a node that has started again."""
        if self._lives.is_shared(hello.name) or hello.boot in self.receiver.sources:
            return []
        effects: list[Effect] = []
        for boot, source in list(self.receiver.sources.items()):
            if source.name == hello.name and boot != hello.boot:
                if self.receiver.watches(boot):
                    self._lives.lose(boot, hello.name, self._age())
                notice = self.receiver.replaced(boot)
                if notice is not None:
                    effects.append(Notify(notice))
                effects += self._forget(boot, "it has started again")
                self._lives.replace(boot, hello.name, now)
        return effects

    def _skew(self, hello: Hello, wall: float) -> list[Effect]:
        skew = hello.clock - wall
        if abs(skew) < SKEW or hello.boot in self._skewed or not (hello.clock and wall):
            return []
        self._skewed.add(hello.boot)
        return [Happened("clock_skew", {"node": hello.name, "seconds": round(skew, 1)})]

    def _hello(
        self, now: float, wall: float, *, asks: float = -1.0, since: float | None = None
    ) -> Hello:
        """Introduce ourselves. `since`: our age from which on to tell who has gone, if asked."""
        age = self._age()
        lately = max(0.0, age - self.rules.forget_after)
        since = lately if since is None else min(since, lately)
        return Hello(
            boot=self.boot,
            name=self.name,
            control=self.control,
            data=self.data,
            writing=-1.0 if self._wrote_at is None else age - self._wrote_at,
            clock=wall,
            cursors=self.sending.cursors(),
            expected=self.receiver.expected(now - self.rules.forget_after),
            gone=self._lives.ended_since(since, age),
            lost=self._lives.lost_since(since, age),
            age=age,
            since=since,
            asks=asks,
        )
