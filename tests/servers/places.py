"""Where a private server lives: a folder, a port, a socket."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT = 30.0
"""Seconds that a server may take to answer."""


class ServerMissing(Exception):
    """There is no program to start; the message says how to get one."""


@contextlib.contextmanager
def private_folder(prefix: str = "emq-") -> Iterator[Path]:
    """Give a new folder that only this user can enter, and remove it after.

    It stands where the path of a unix socket in it is short enough (108 bytes with
    its end on Linux, 104 on macOS).
    """
    parent = tempfile.gettempdir()
    if len(parent) > 60:
        parent = "/tmp"  # noqa: S108  (mkdtemp makes a folder that is ours alone)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free just now; the caller retries if it lost it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def listening_socket(port: int = 0) -> socket.socket:
    """Return a listening TCP socket on 127.0.0.1, to be handed to a server (`--fd`)."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
        sock.listen(128)
    except OSError:
        sock.close()
        raise
    return sock
