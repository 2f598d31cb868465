"""The worker's lease: one row, renewed by a thread that does nothing else.

Its connection is its own, and the row is touched by nobody but the one who takes the
lease away. So neither a handler that keeps the interpreter busy, nor a lock on a job,
nor a full connection pool stops a renewal.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable

from ..models.worker import Worker
from .connections import service_connection
from .wakeup import Wakeup

logger = logging.getLogger("echomq.jobs")


class Lease:
    """Holds a worker's row. `id` changes when the lease was lost and a new one was taken."""

    def __init__(
        self,
        using: str,
        *,
        name: str,
        queues: list[str],
        concurrency: int,
        lease: float,
        heartbeat: float,
        patience: float,
        on_lost: Callable[[], object],
    ) -> None:
        self._using = using
        self._name = name
        self._queues = queues
        self._concurrency = concurrency
        self._seconds = lease
        self._heartbeat = heartbeat
        self._patience = patience
        self._on_lost = on_lost
        self._wakeup = Wakeup()
        self._renewed = 0.0
        self._thread = threading.Thread(target=self._run, name="echomq-heartbeat", daemon=True)
        self.id = 0
        self.generation = 0
        """Counts losses; grows before `on_lost` is called."""

    def acquire(self) -> None:
        """Write the row and start to renew it. Raises what the database raises."""
        self._register()
        self._thread.start()

    @property
    def in_doubt(self) -> bool:
        """Whether it may have run out: no renewal has come through for as long as it lasts."""
        return time.monotonic() - self._renewed > self._seconds

    def release(self) -> None:
        """Stop renewing, and mark the row as ended. On the caller's connection."""
        self._wakeup.close()
        self._thread.join(2.0)
        Worker.objects.using(self._using).stop(self.id)

    def _register(self) -> None:
        asked = time.monotonic()
        row = Worker.objects.using(self._using).register(
            name=self._name,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=self._queues,
            concurrency=self._concurrency,
            lease=self._seconds,
        )
        self.id = row.pk
        self._renewed = asked

    def _run(self) -> None:
        service = service_connection(
            self._using,
            "heartbeat",
            self._wakeup,
            patience=self._patience,
            longest_pause=self._heartbeat,
        )
        with service as persistent:
            while not self._wakeup.closed:
                started = time.monotonic()
                persistent.attempt("heartbeat", self._beat, default=None)
                self._wakeup.wait(max(0.0, started + self._heartbeat - time.monotonic()))

    def _beat(self) -> None:
        asked = time.monotonic()
        if Worker.objects.using(self._using).heartbeat(self.id, self._seconds):
            self._renewed = asked
            return
        if self._wakeup.closed:
            return
        logger.error("event=lease_lost worker=%s id=%d", self._name, self.id)
        # First the handlers, then a new row: a claim under way carries the old one.
        self.generation += 1
        self._on_lost()
        self._register()
