"""`make demo`: the web server, a worker and a broker, started and stopped as one.

    python -m project.demo

The data is kept in .demo/ (SQLite, and the logs of the last run). Environment: PORT
(8000 by default, or a free one if that is taken), ECHOMQ_DEMO_REDIS=0 for a run
without a broker, and what project/settings.py reads.

Ctrl-C or SIGTERM ends everything in order; a second one at once. If this process is
killed, the kernel ends the children (guard.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import django
from django.core.management import call_command

from project.children import Child, ChildFailed
from project.private_redis import find_redis_server, redis_command

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT = 30.0
PORT_MAX = 65_535
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop(BaseException):
    """Somebody asked for the end."""


class CannotStart(Exception):
    """The demo can't start; the message says why, and what to do."""


def main() -> int:
    """Run until asked to stop; return the exit code: 0, or 1 when something failed."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    for number in SIGNALS:
        signal.signal(number, _raise_stop)
    try:
        with contextlib.ExitStack() as stack:
            _run(stack)
    except Stop:
        print("\nStopped.", flush=True)
    except (ChildFailed, CannotStart) as error:
        print(f"\nThe demo has ended: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _raise_stop(number: int, frame: FrameType | None) -> None:
    raise Stop


def _run(stack: contextlib.ExitStack) -> None:
    django.setup()
    from django.conf import settings

    folder: Path = settings.DEMO_DIR
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stack.enter_context(_only_one(folder))
    print("Preparing the database", flush=True)
    password = _prepare_database(folder)
    # Stopped in reverse: first the worker, which hands back its jobs, last the broker.
    children = []
    redis = _start_redis(stack, folder)
    if redis:
        children.append(redis)
    sock = stack.enter_context(_listen())
    address = f"http://127.0.0.1:{sock.getsockname()[1]}/"
    web = _start("web", _uvicorn(sock), stack, folder, keep=sock)
    # Ours goes: once the server has ended, its port has to refuse.
    sock.close()
    worker = _start("worker", _manage("echomq_worker", "--grace", "5"), stack, folder)
    children += [web, worker]
    _wait_for_page(address, children)
    broker = "Redis, private" if redis else os.environ.get("ECHOMQ_REDIS_URL") or "none"
    print(
        f"\n  {address}\n"
        f"  {address}admin/   user admin, password {password}\n\n"
        f"  broker: {broker}; data and logs: {folder}\n"
        "  Ctrl-C stops everything.",
        flush=True,
    )
    while True:
        for child in children:
            child.check()
        time.sleep(0.2)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the folder for this demo alone: two would share the jobs, not the broker."""
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotStart(f"another demo runs on {folder}. Stop it first.") from None
        yield


def _prepare_database(folder: Path) -> str:
    """Migrate, see to the user `admin`, and return its password, the same at every start."""
    from django.contrib.auth.models import User
    from django.db import connections

    call_command("migrate", interactive=False, verbosity=0)
    kept = folder / "admin-password"
    if not kept.exists():
        kept.touch(mode=0o600)
        kept.write_text(secrets.token_urlsafe(9))
    password = kept.read_text()
    user, _ = User.objects.get_or_create(
        username="admin", defaults={"is_staff": True, "is_superuser": True}
    )
    if not user.check_password(password):
        user.set_password(password)
        user.save()
    connections.close_all()
    return password


def _start_redis(stack: contextlib.ExitStack, folder: Path) -> Child | None:
    """Start a Redis that keeps nothing, if there is a program and no other is configured."""
    program = find_redis_server()
    if os.environ.get("ECHOMQ_REDIS_URL") or os.environ.get("ECHOMQ_DEMO_REDIS") == "0":
        return None
    if program is None:
        print("There is no redis-server: going on without a broker.", flush=True)
        return None
    place = folder.absolute()
    if len(str(place)) > 80:  # the path of a socket may have about 100 bytes
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="emq-demo-")))
    child = _start("redis", redis_command(program, place), stack, folder)
    path = place / "redis.sock"
    _wait(lambda: _accepts(path), [child], "Redis does not answer")
    os.environ["ECHOMQ_REDIS_URL"] = f"unix://{path}"
    return child


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
        sock.connect(str(path))
        return True
    return False


def _listen() -> socket.socket:
    """Return a listening socket: bound here, so nobody can take the port in between."""
    wanted = os.environ.get("PORT")
    if wanted and not (wanted.isdecimal() and int(wanted) <= PORT_MAX):
        raise CannotStart(f"PORT is a number up to {PORT_MAX}, not {wanted!r}.")
    for port in [int(wanted)] if wanted else [8000, 0]:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
            sock.listen(128)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise CannotStart(f"port {wanted or 8000}: {failure.strerror}. Choose another: PORT=8001.")


def _uvicorn(sock: socket.socket) -> list[str]:
    return [
        *(sys.executable, "-m", "uvicorn", "project.asgi:application"),
        *("--fd", str(sock.fileno()), "--timeout-graceful-shutdown", "2"),
    ]


def _manage(*arguments: str) -> list[str]:
    return [sys.executable, "manage.py", *arguments]


def _start(
    name: str,
    command: list[str],
    stack: contextlib.ExitStack,
    folder: Path,
    *,
    keep: socket.socket | None = None,
) -> Child:
    """Start a child that is stopped with the stack; its output goes to `<name>.log`."""
    log = folder / f"{name}.log"
    log.write_text("")
    child = Child(
        command,
        name=name,
        log=log,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        pass_fds=[keep.fileno()] if keep else [],
    )
    stack.callback(child.stop)
    return child


def _wait_for_page(address: str, children: list[Child]) -> None:
    def answers() -> bool:
        try:
            urllib.request.urlopen(address, timeout=5).close()  # noqa: S310  (our own address)
        except urllib.error.HTTPError as error:
            return error.code < 500
        except OSError:
            return False
        return True

    _wait(answers, children, f"{address} does not answer")


def _wait(condition: Callable[[], bool], children: list[Child], failure: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not condition():
        for child in children:
            child.check()
        if time.monotonic() > deadline:
            raise CannotStart(f"{failure} after {START_TIMEOUT:g} s.")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
