"""The rules of a test run, seen from outside: a run of pytest on tests made for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

CASES = """
import threading
import pytest
from django.test import TestCase

def test_pure(): pass

@pytest.mark.django_db
def test_marked(): pass

def test_by_fixture(transactional_db): pass

def test_by_way_of_another_fixture(subprocess_env): pass

class DjangoTest(TestCase):
    def test_method(self): pass

@pytest.mark.postgres
def test_for_postgres(): pass

@pytest.mark.sqlite
def test_for_sqlite(): pass
"""

LEAKS = """
import threading

release = threading.Event()

def test_leaving_a_thread():
    threading.Thread(target=release.wait, name="left behind").start()

def test_leaving_a_daemon():
    threading.Thread(target=release.wait, daemon=True).start()

def test_leaving_a_thread_that_ends_by_itself():
    threading.Thread(target=release.wait, args=[0.3]).start()

def teardown_module():
    release.set()
"""


def without_the_outer_run() -> dict[str, str]:
    """Return the environment without what the run that this test is in has put there."""
    outer = re.compile(r"ECHOMQ_TEST_|DJANGO_SETTINGS_MODULE$|PYTEST_ADDOPTS$")
    return {name: value for name, value in os.environ.items() if not outer.match(name)}


def outcome(tmp_path: Path, source: str, *options: str, env: dict[str, str] | None = None) -> str:
    """Run pytest on `source` under this project's rules, and return what it prints."""
    file = tmp_path / "test_made_for_it.py"
    file.write_text(source)
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", "-v"]
    done = subprocess.run(
        [*command, "-p", "tests.conftest", "-p", "no:cacheprovider", str(file), *options],
        cwd=ROOT,
        env=without_the_outer_run() | (env or {}),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return done.stdout + done.stderr


def names(collected: str) -> set[str]:
    return set(re.findall(r"::(\w+)$", collected, re.MULTILINE))


def test_what_uses_a_database_is_marked(tmp_path: Path) -> None:
    options = ["--collect-only", "-qq", "--database=postgres"]
    using = {
        "test_marked",
        "test_by_fixture",
        "test_by_way_of_another_fixture",
        "test_method",
        "test_for_postgres",
        "test_for_sqlite",
    }
    assert names(outcome(tmp_path, CASES, *options, "-m", "database")) == using
    assert names(outcome(tmp_path, CASES, *options)) == {*using, "test_pure"}


def test_what_is_for_the_other_database_is_skipped(tmp_path: Path) -> None:
    shown = outcome(tmp_path, CASES, "-rs")
    assert "6 passed, 1 skipped" in shown
    assert re.search(r"SKIPPED .*only on postgres", shown)


def test_thread_left_behind_is_an_error_of_its_test(tmp_path: Path) -> None:
    shown = outcome(tmp_path, LEAKS)
    assert "3 passed, 1 error" in shown
    assert "Failed: threads still run after the test: left behind" in shown


def test_warning_is_an_error(tmp_path: Path) -> None:
    shown = outcome(tmp_path, "import warnings\ndef test_it(): warnings.warn('old')\n")
    assert "1 failed" in shown


def test_settings_that_another_run_has_chosen_are_refused(tmp_path: Path) -> None:
    # Its database would be the other run's, and be made anew under it.
    database = tmp_path / "echomq.sqlite3"
    database.write_bytes(b"of the other run")
    chosen = {"ECHOMQ_TEST_FOLDER": str(tmp_path), "DJANGO_SETTINGS_MODULE": "tests.settings"}

    shown = outcome(tmp_path, CASES, env=chosen)

    assert "DJANGO_SETTINGS_MODULE" in shown and "passed" not in shown
    assert database.read_bytes() == b"of the other run"
