"""What goes to the other nodes: one frame in flight for each, its ack, and its failure.

A frame that isn't acked in time is given up. Its node is suspected then: it is pinged, with
a growing pause, and gets no batch until it says something, whatever that is. What it needs
is then sent again at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..retry import ceiling
from .effects import Effect, Happened, SendBatch
from .frames import Ack, Batch, Record
from .peers import Peer, Rules
from .producer import Producer

BACKOFF_CAP = 5.0


class Sending:
    """The producers of a node, and the nodes that they send to (its peers)."""

    def __init__(self, name: str, boot: str, rules: Rules) -> None:
        self.control = ""
        """Where acks should go."""
        self.peers: dict[str, Peer] = {}
        self.producers = [
            Producer(rules.buffer_size, rules.max_batch) for _ in range(rules.pool_size)
        ]
        self._name = name
        self._boot = boot
        self._rules = rules

    def write(self, index: int, record: Record) -> int:
        """Keep a record for the other nodes; return its position."""
        return self.producers[index].write(record)

    def flush(self, now: float) -> list[Effect]:
        """Send what was written, to everybody who needs it and has no frame in flight."""
        for producer in self.producers:
            producer.flush()
        return self.pump(self.peers, now)

    def cursors(self) -> list[int]:
        """Return the write cursors."""
        return [producer.ring.write_cursor for producer in self.producers]

    def drained(self) -> bool:
        """Tell whether every node that we know has everything, as far as we know."""
        return all(
            producer.lag(boot) == 0 for producer in self.producers for boot in producer.links
        ) and all(boot in self.producers[0].links for boot in self.peers)

    def fill(self) -> float:
        """Return how full the fullest buffer is of records that somebody still needs, 0 to 1."""
        worst = max(
            (producer.lag(boot) for producer in self.producers for boot in producer.links),
            default=0,
        )
        return min(1.0, worst / self._rules.buffer_size)

    def seat(self, boot: str, expected: dict[int, int]) -> None:
        """Take a node's word for what it needs next, by the producer's index."""
        for index, cursor in expected.items():
            if 0 <= index < len(self.producers) and self.producers[index].seat(boot, cursor):
                self._settled(boot, index)

    def heard(self, boot: str, now: float) -> list[Effect]:
        """Note that a node has said something: whatever it was, it can be sent to again."""
        peer = self.peers.get(boot)
        if peer is None:
            return []
        peer.heard = now
        peer.suspect = False
        return self.pump([boot], now)

    def acked(self, ack: Ack, now: float) -> list[Effect]:
        """Take an ack, and send what comes next."""
        peer = self.peers.get(ack.boot)
        if peer is None or not 0 <= ack.index < len(self.producers):
            return []
        effects: list[Effect] = []
        if self.producers[ack.index].ack(ack.boot, ack.cursor):
            peer.failures = 0
            details = {"node": peer.name, "index": ack.index, "seconds": now - peer.served}
            effects.append(Happened("batch_acked", details))
        self._settled(ack.boot, ack.index)
        return effects + self.pump([ack.boot], now)

    def failed(self, boot: str, index: int, reason: str, now: float) -> list[Effect]:
        """Hear that a batch could not be sent, or wasn't acked in time."""
        peer = self.peers.get(boot)
        if peer is None or peer.awaiting.pop(index, None) is None:
            return []
        self.producers[index].failed(boot)
        peer.suspect = True
        peer.failures += 1
        delay = self._backoff(peer)
        peer.ping_at = now + delay
        return [
            Happened("sync_failure", {"node": peer.name, "index": index, "reason": reason}),
            Happened(
                "retry_scheduled", {"node": peer.name, "delay": delay, "attempt": peer.failures}
            ),
        ]

    def overdue(self, boot: str, now: float) -> list[Effect]:
        """Give up the frames to a node whose acks are late."""
        late = [index for index, until in self.peers[boot].awaiting.items() if now >= until]
        effects: list[Effect] = []
        for index in late:
            effects += self.failed(boot, index, "not acked in time", now)
        return effects

    def ping_is_due(self, boot: str, now: float) -> bool:
        """Tell whether a suspected node should be asked again now; if so, that is noted."""
        peer = self.peers[boot]
        if not peer.suspect or now < peer.ping_at:
            return False
        peer.failures += 1
        peer.ping_at = now + self._backoff(peer)
        return True

    def is_expired(self, boot: str) -> bool:
        """Tell whether the node needs records that are gone."""
        return any(producer.is_expired(boot) for producer in self.producers)

    def forget(self, boot: str) -> Peer | None:
        """Keep nothing more about a node; return what was known of it."""
        for producer in self.producers:
            producer.forget(boot)
        return self.peers.pop(boot, None)

    def pump(self, boots: Iterable[str], now: float) -> list[Effect]:
        """Send the next frame to each of these that needs one and has none in flight."""
        effects: list[Effect] = []
        if not self._rules.concurrent_flush:
            boots = sorted(self.peers, key=lambda boot: self.peers[boot].served)
        for boot in boots:
            peer = self.peers[boot]
            for index in range(len(self.producers)):
                if not peer.suspect and index not in peer.awaiting and self._may_send():
                    effects += self._send_next(boot, peer, index, now)
        return effects

    def _send_next(self, boot: str, peer: Peer, index: int, now: float) -> list[Effect]:
        due = self.producers[index].due(boot)
        if due is None:
            return []
        effects: list[Effect] = []
        if due.missed:
            details = {"node": peer.name, "index": index, "missed": due.missed}
            effects.append(Happened("buffer_expired", details))
        peer.awaiting[index] = now + self._rules.call_timeout
        peer.served = now
        frame = Batch(
            boot=self._boot,
            name=self._name,
            control=self.control,
            index=index,
            base=due.base,
            records=due.records,
        )
        return [*effects, SendBatch(boot, peer.data, frame)]

    def _may_send(self) -> bool:
        return self._rules.concurrent_flush or not any(
            peer.awaiting and not peer.suspect for peer in self.peers.values()
        )

    def _settled(self, boot: str, index: int) -> None:
        peer = self.peers.get(boot)
        link = self.producers[index].links.get(boot)
        if peer is not None and (link is None or link.in_flight is None):
            peer.awaiting.pop(index, None)

    def _backoff(self, peer: Peer) -> float:
        base = self._rules.retry_interval
        return ceiling(peer.failures, base=base, cap=max(base, BACKOFF_CAP))
