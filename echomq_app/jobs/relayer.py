"""Moves the queues' records from the outbox into their streams, beside everything else.

On PostgreSQL alone: on SQLite there is no outbox, and no thread. Called by: the worker's main
thread and the completer (`soon`), when something was written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from functools import partial

from django.db import connections

from ..core.names import queue_stream
from ..models.each import for_each
from ..models.relaying import Relay
from .connections import Persistent, service_connection
from .wakeup import Wakeup

INTERVAL = 1.0
"""Seconds after which it looks by itself: clients that enqueue wake only the worker."""
BATCH = 1_000
REST = 5.0
"""Seconds for which a stream is left alone whose relay failed."""


class Relayer:
    """One thread with one connection; see the module."""

    def __init__(self, using: str, queues: Collection[str], *, patience: float) -> None:
        self._using = using
        self._patience = patience
        self._relays = [Relay(using, queue_stream(name)) for name in sorted(queues)]
        self._rests: dict[Relay, float] = {}
        """Those that failed, and until when they are left alone."""
        self._wakeup = Wakeup()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if connections[self._using].vendor == "postgresql":
            self._thread = threading.Thread(target=self._run, name="echomq-relayer", daemon=True)
            self._thread.start()

    def soon(self) -> None:
        """Look now: something was written. Returns at once."""
        self._wakeup.call()

    def close(self, timeout: float) -> None:
        """Move what there is, for at most `timeout` seconds: the rest is the next worker's."""
        self._wakeup.close()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        service = service_connection(self._using, "relayer", self._wakeup, patience=self._patience)
        with service as persistent:
            while not self._wakeup.closed:
                self._turn(persistent)
                self._wakeup.wait(INTERVAL)
            self._turn(persistent)

    def _turn(self, persistent: Persistent) -> None:
        # A batch of each in turn: the backlog of one queue is nobody else's.
        now = time.monotonic()
        left: list[Relay] | None = [one for one in self._relays if self._rests.get(one, 0.0) <= now]
        while left:
            left = persistent.attempt("relay", partial(self._move, left), default=None)

    def _move(self, relays: list[Relay]) -> list[Relay]:
        """Move a batch of each; return those that have more."""
        more: list[Relay] = []

        def move(some: Sequence[Relay]) -> None:
            (relay,) = some
            # A row may be many records: a full batch is hardly ever exactly full.
            if (relay.move(BATCH) or 0) > BATCH // 2:
                more.append(relay)

        for failure in for_each(self._using, relays, move, doing="relay"):
            self._rests[failure.item] = time.monotonic() + REST
        return more
