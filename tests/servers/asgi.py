"""An ASGI application under a real server process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from project.children import Child, ChildFailed

from .places import listening_socket, private_folder

ROOT = Path(__file__).resolve().parents[2]


class AsgiServer:
    """An ASGI application under a real server process; see `private_asgi`."""

    def __init__(
        self,
        application: str,
        server: str,
        env: Mapping[str, str],
        folder: Path,
        options: Sequence[str] = (),
    ) -> None:
        self.application = application
        self.server = server
        self.options = options
        self.env = dict(env)
        self.folder = folder
        self.port = 0
        self.process = self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def stop(self) -> int:
        """Ask it to end (SIGTERM), and return its exit code; connections are refused after."""
        return self.process.stop()

    def kill(self) -> None:
        """End it without notice (SIGKILL)."""
        self.process.kill()

    def restart(self) -> None:
        """Stop it if it runs, and start it again on the same port."""
        self.process.stop()
        self.process = self._start()

    def _start(self) -> Child:
        # The socket is bound here, so no other process can take the port in between,
        # and a client that comes before the server is up waits instead of failing.
        # Our own copy is closed: a dead server's port has to refuse.
        with listening_socket(self.port) as sock:
            self.port = sock.getsockname()[1]
            child = Child(
                self._command(sock.fileno()),
                name=self.server,
                env=self.env,
                cwd=ROOT,
                log=self.folder / f"{self.server}.log",
                pass_fds=[sock.fileno()],
            )
        try:
            child.wait_for_output(r"Uvicorn running on|Listening on")
        except ChildFailed:
            child.stop()
            raise
        return child

    def _command(self, fd: int) -> list[str]:
        if self.server == "daphne":
            return [
                *(sys.executable, "-m", "daphne", "--fd", str(fd), *self.options),
                self.application,
            ]
        return [
            *(sys.executable, "-m", "uvicorn", self.application, "--fd", str(fd)),
            *("--timeout-graceful-shutdown", "3", *self.options),
        ]


@contextlib.contextmanager
def private_asgi(
    application: str = "project.asgi:application",
    *,
    server: str = "uvicorn",
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Iterator[AsgiServer]:
    """Run `application` under `uvicorn` or `daphne` for the length of the block.

    `env` is the whole environment of the process (default: ours). In tests it is
    the fixture `subprocess_env`, so that the server uses the test database. `options` are
    more words of its command line.
    """
    with private_folder("emq-asgi-") as folder:
        environment = os.environ if env is None else env
        running = AsgiServer(application, server, environment, folder, options)
        try:
            yield running
        finally:
            running.process.stop()
