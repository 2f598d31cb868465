"""A TCP proxy whose link can be cut and mended, in a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Proxy:
    """Passes connections to 127.0.0.1:`target`; see `private_proxy`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._refuses = False
        self._server = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._server.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Break all connections; new ones are broken at once."""
        self._refuses = True
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        """Pass nothing on, and break nothing: a half-open link."""
        self._flows.clear()

    def heal(self) -> None:
        """Be well again."""
        self._refuses = False
        self._flows.set()

    def close(self) -> None:
        """End it, and every connection."""
        self.heal()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.cut()
        self._thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self._refuses:
                client.close()
                continue
            try:
                upstream = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            for source, sink in ((client, upstream), (upstream, client)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with self._lock:
            self._sockets.add(source)
        try:
            while data := source.recv(65536):
                self._flows.wait()
                sink.sendall(data)
        except OSError:
            pass
        finally:
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_RDWR)
            with self._lock:
                self._sockets.discard(source)
            source.close()


@contextlib.contextmanager
def private_proxy(target: int) -> Iterator[Proxy]:
    """Run a proxy to a port of this machine for the length of the block."""
    proxy = Proxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
