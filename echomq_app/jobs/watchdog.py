"""Cuts a database connection that has stopped answering.

TCP keepalives find out that the other machine is gone. They don't find out that its
server, or a proxy in between, accepts everything and answers nothing: a statement then
waits for ever, and with it the thread. So one thread of the process looks at what the
worker's threads wait for, and shuts the socket of a statement that takes too long. The
thread gets an error, as from any broken connection, and connects again.

A statement may also be slow for a good reason, such as a migration that holds the table:
each cut of the same thread doubles its patience, until a statement of its succeeds.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Any

logger = logging.getLogger("echomq.jobs")

LOOK_INTERVAL = 0.5
_MOST_DOUBLINGS = 6


class Watch:
    """What one thread is waiting for."""

    def __init__(self, name: str, patience: float) -> None:
        self.name = name
        self._patience = patience
        self._lock = threading.Lock()
        self._connection: Any = None
        self._since = 0.0
        self._cuts = 0

    def begin(self, connection: Any) -> None:
        """A statement on Django's `connection` begins."""
        with self._lock:
            self._connection, self._since = connection, time.monotonic()

    def end(self, *, well: bool) -> None:
        """It has ended; the connection may be closed after this, and not before."""
        with self._lock:
            self._connection = None
            if well:
                self._cuts = 0

    def look(self) -> None:
        """Shut the socket if the statement has taken too long."""
        with self._lock:
            raw = getattr(self._connection, "connection", None)
            waited = time.monotonic() - self._since
            if raw is None or waited < self._patience * 2**self._cuts:
                return
            self._cuts = min(self._cuts + 1, _MOST_DOUBLINGS)
            self._since = time.monotonic()
            logger.error("event=connection_cut thread=%s waited=%.1f", self.name, waited)
            try:
                with socket.fromfd(raw.fileno(), socket.AF_UNSPEC, socket.SOCK_STREAM) as link:
                    link.shutdown(socket.SHUT_RDWR)
            except Exception as error:  # noqa: BLE001  (it ended by itself in this moment)
                logger.debug("event=connection_cut_failed thread=%s error=%r", self.name, error)


class Watchdog:
    """One thread, which runs while there is anything to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: set[Watch] = set()
        self._running = False

    def add(self, watch: Watch) -> None:
        """Look at this from now on."""
        with self._lock:
            self._watches.add(watch)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="echomq-watchdog", daemon=True).start()

    def remove(self, watch: Watch) -> None:
        """Look at it no more."""
        with self._lock:
            self._watches.discard(watch)

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_INTERVAL)
            with self._lock:
                watches = list(self._watches)
                if not watches:
                    self._running = False
                    return
            for watch in watches:
                watch.look()


watchdog = Watchdog()
"""That of this process."""
