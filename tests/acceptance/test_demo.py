"""`make demo`, as it is started: it answers, keeps its data, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from project import demo as project_demo
from project.children import Child
from project.private_redis import find_redis_server
from tests.servers import listening_socket
from tests.wait import wait_until

ROOT = Path(__file__).parents[2]

Demo = Callable[..., Child]


@pytest.fixture
def start_demo(tmp_path: Path) -> Iterator[Demo]:
    """Give a function that starts the demo on a folder of its own and waits for the address."""
    demos: list[Child] = []

    def start(**extra: str) -> Child:
        ours = ("ECHOMQ_", "DJANGO_SETTINGS_MODULE", "PORT")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        env |= {"ECHOMQ_DEMO_DIR": str(tmp_path / "demo"), "PYTHONUNBUFFERED": "1", **extra}
        log = tmp_path / f"demo-{len(demos)}.log"
        demo = Child([sys.executable, "-m", "project.demo"], cwd=ROOT, env=env, log=log)
        demos.append(demo)
        return demo

    yield start
    for demo in demos:
        demo.stop()


def address_of(demo: Child) -> str:
    return demo.wait_for_output(r"^  (http://127\.0\.0\.1:\d+/)$", timeout=60)[1]


def status(url: str) -> int:
    return httpx.get(url, timeout=10).status_code


def family(demo: Child) -> list[psutil.Process]:
    """Return the demo's descendants."""
    return psutil.Process(demo.pid).children(recursive=True)


def assert_ended(processes: list[psutil.Process], address: str) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    with pytest.raises(httpx.ConnectError):
        status(address)


def test_demo_answers_and_keeps_its_data(start_demo: Demo, tmp_path: Path) -> None:
    shown = []
    for number in (signal.SIGINT, signal.SIGTERM):
        demo = start_demo()
        address = address_of(demo)
        assert status(address) == 200
        assert status(address + "admin/login/") == 200
        assert status(address + "static/admin/css/base.css") == 200
        shown.append(re.search(r"user admin, password (\S+)", demo.output))
        children = family(demo)
        assert len(children) >= (3 if find_redis_server() else 2)
        demo.send_signal(number)
        assert demo.wait() == 0, demo.output
        assert_ended(children, address)
    first, second = shown
    assert first is not None
    assert second is not None
    assert first[1] == second[1]
    with sqlite3.connect(tmp_path / "demo" / "db.sqlite3") as connection:
        users = connection.execute("SELECT username FROM auth_user").fetchall()
    connection.close()
    assert users == [("admin",)]


def test_killed_demo_takes_its_children_along(start_demo: Demo) -> None:
    demo = start_demo()
    address = address_of(demo)
    children = family(demo)
    os.kill(demo.pid, signal.SIGKILL)
    assert demo.wait() == -signal.SIGKILL
    assert_ended(children, address)


def test_without_a_broker(start_demo: Demo) -> None:
    demo = start_demo(ECHOMQ_DEMO_REDIS="0")
    assert status(address_of(demo)) == 200
    assert "broker: none" in demo.output


@pytest.mark.parametrize("victim", ["uvicorn", "echomq_worker"])
def test_child_that_dies_ends_the_demo_with_an_error(start_demo: Demo, victim: str) -> None:
    demo = start_demo()
    address = address_of(demo)
    children = family(demo)
    [chosen] = [child for child in children if victim in child.cmdline()]
    chosen.kill()
    assert demo.wait() == 1
    assert re.search(r"The demo has ended: \w+ ended by signal SIGKILL", demo.output)
    assert_ended(children, address)


def test_second_demo_on_the_same_data_is_refused(start_demo: Demo) -> None:
    address = address_of(start_demo())
    second = start_demo()
    assert second.wait() == 1
    assert "another demo runs on" in second.output
    assert status(address) == 200


def test_port_that_is_taken_is_named(start_demo: Demo) -> None:
    with listening_socket() as taken:
        port = str(taken.getsockname()[1])
        demo = start_demo(PORT=port)
        assert demo.wait() == 1
    assert f"port {port}: Address already in use" in demo.output


@pytest.mark.parametrize("port", ["http", "65536", "-1"])
def test_port_that_is_none_is_named(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", port)
    with pytest.raises(project_demo.CannotStart, match=f"not '{port}'"):
        project_demo._listen()


def test_interrupted_while_it_starts(start_demo: Demo) -> None:
    demo = start_demo()
    demo.wait_for_output("Preparing the database")
    wait_until(lambda: family(demo) or not demo.running, message="a first child")
    children = family(demo)
    demo.send_signal(signal.SIGINT)
    assert demo.wait() == 0, demo.output
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []


def test_failing_start_shows_the_childs_words(start_demo: Demo, tmp_path: Path) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho refused on purpose; exit 3\n")
    broken.chmod(0o755)
    demo = start_demo(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert demo.wait() == 1
    assert "The demo has ended: redis ended with exit code 3." in demo.output
    assert "refused on purpose" in demo.output
