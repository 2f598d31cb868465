"""A project of a user's, with its own tests, in the ways projects are set up and tested."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.db import connection

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = "tests.acceptance.projects.shop.settings"
DJANGO = [sys.executable, "-W", "error", "-m", "django"]
PYTEST = [sys.executable, "-m", "pytest", "--ds", SETTINGS, "-p", "no:cacheprovider"]


def run(env: dict[str, str], *command: str, **changes: str) -> str:
    """Run a command of the shop's, which has to succeed; return what it printed."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**env, "DJANGO_SETTINGS_MODULE": SETTINGS, "PYTHONPATH": str(ROOT), **changes},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def django_tests(env: dict[str, str], *options: str, skipped: int, **changes: str) -> None:
    """Run the shop's tests with Django's runner; no more of them are skipped than known."""
    command = [*DJANGO, "test", "tests.acceptance.projects.shop", "--noinput", *options]
    output = run(env, *command, **changes)
    assert re.search(rf"Ran 17 tests[^\n]*\n\nOK \(skipped={skipped}\)", output), output


IN_MEMORY = connection.vendor == "sqlite"
"""One more is skipped: Django's test database in memory is no place for threads."""


def test_djangos_runner(subprocess_env: dict[str, str]) -> None:
    django_tests(subprocess_env, skipped=1 + IN_MEMORY)


def test_in_parallel(subprocess_env: dict[str, str]) -> None:
    """Each process has a clone of the database, functions and triggers included."""
    django_tests(subprocess_env, "--parallel", "2", skipped=1 + IN_MEMORY)


def test_the_log_in_a_database_of_its_own_and_local_times(subprocess_env: dict[str, str]) -> None:
    django_tests(subprocess_env, skipped=2 + IN_MEMORY, SHOP_LOG_DATABASE="1", SHOP_USE_TZ="0")


@pytest.mark.postgres
def test_serializable(subprocess_env: dict[str, str]) -> None:
    django_tests(subprocess_env, skipped=7, SHOP_ISOLATION="SERIALIZABLE")


@pytest.mark.postgres
def test_djangos_connection_pool(subprocess_env: dict[str, str]) -> None:
    django_tests(subprocess_env, skipped=1, SHOP_POOL="1")


@pytest.mark.parametrize("option", ["--migrations", "--nomigrations"])
def test_pytest(subprocess_env: dict[str, str], option: str) -> None:
    here = "tests/acceptance/projects"
    output = run(subprocess_env, *PYTEST, "--confcutdir", here, option, f"{here}/shop/tests.py")
    assert re.search(r"\d+ passed", output), output
