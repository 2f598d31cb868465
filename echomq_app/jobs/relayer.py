"""Moves the queues' records from the outbox into their streams, beside everything else.

On PostgreSQL alone: on SQLite there is no outbox, and no thread. Called by: the worker's main
thread and the completer (`soon`), when something was written.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence

from django.db import connections

from ..core.names import queue_stream
from ..models.each import Rests
from ..models.relaying import Relay
from .connections import Persistent, service_connection
from .wakeup import Wakeup

INTERVAL = 1.0
"""Seconds after which it looks by itself: clients that enqueue wake only the worker."""
BATCH = 1_000


class Relayer:
    """One thread with one connection; see the module."""

    def __init__(self, using: str, queues: Collection[str], *, patience: float) -> None:
        self._using = using
        self._patience = patience
        streams = [queue_stream(name) for name in sorted(queues)]
        self._relays = {stream: Relay(using, stream) for stream in streams}
        self._rests: Rests[str] = Rests()
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
        left = list(self._relays)
        while left:
            # A row may be many records: a full batch is hardly ever exactly full.
            left = [one for one in left if self._move(persistent, one) > BATCH // 2]

    def _move(self, persistent: Persistent, stream: str) -> int:
        moved = 0

        def move(_: Sequence[str]) -> None:
            nonlocal moved
            moved = self._relays[stream].move(BATCH) or 0

        def attempt() -> bool:
            return self._rests.for_each(self._using, [stream], move, doing="relay")

        # Only a lost connection comes out: then a pause helps, and it is all streams'.
        persistent.attempt("relay", attempt, default=False)
        return moved
