"""Private servers: PostgreSQL, Redis, and our own ASGI application.

Context managers without pytest, for the fixtures in conftest.py and for the
benchmarks. Every server lives in a temporary folder of its own, listens on a unix
socket there where the client can use one, dies with this process (project/guard.py)
and is stopped at the end of the block. None needs root; as root, PostgreSQL, which
refuses to run as root, runs as an unprivileged user.
"""

from .asgi import AsgiServer, private_asgi
from .places import ServerMissing, free_port, listening_socket, private_folder
from .postgresql import Postgres, find_postgres, private_postgres
from .redis_server import Redis, private_redis

__all__ = [
    "AsgiServer",
    "Postgres",
    "Redis",
    "ServerMissing",
    "find_postgres",
    "free_port",
    "listening_socket",
    "private_asgi",
    "private_folder",
    "private_postgres",
    "private_redis",
]
