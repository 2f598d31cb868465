"""What a failed test leaves behind for whoever has to understand it: who held what.

A test that timed out on PostgreSQL was mostly waiting for somebody; the server knows whom.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Generator
from typing import Any

import pytest

from echomq_app.core.payload import storable

_ACTIVITY = """
    SELECT datname, pid, application_name, state, wait_event_type, wait_event,
           now() - xact_start AS in_transaction, pg_blocking_pids(pid) AS behind, left(query, 200)
    FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
    ORDER BY xact_start NULLS LAST"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the server's sessions and the machine's processes to the report of a failure."""
    report = yield
    # Tests log what no database takes; pytest-xdist couldn't send it either.
    report.sections = [(name, storable(text)) for name, text in report.sections]
    if report.failed and os.environ.get("ECHOMQ_TEST_DATABASE") == "postgres":
        report.sections.append(("sessions of PostgreSQL", _sessions()))
    if report.failed:
        load = " ".join(f"{figure:.1f}" for figure in os.getloadavg())
        report.sections.append((f"processes, load {load}", _processes()))
    return report


def _sessions() -> str:
    import psycopg
    from django.db import connections

    settings: dict[str, Any] = connections.databases["default"]
    try:
        with psycopg.connect(
            host=settings["HOST"], user=settings["USER"], dbname="postgres", connect_timeout=5
        ) as session:
            rows = session.execute(_ACTIVITY).fetchall()
    except psycopg.Error as error:
        return f"can't be asked: {error}"
    return "\n".join(" | ".join(str(value) for value in row) for row in rows) or "none"


def _processes() -> str:
    """List what descends from this process, and itself."""
    command = ["ps", "-ww", "-eo", "pid=,ppid=,stat=,etime=,time=,args="]
    try:
        lines = subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return f"can't be listed: {error}"
    ours, more = {os.getpid()}, True
    while more:
        found = {int(pid) for pid, parent, *_ in map(str.split, lines) if int(parent) in ours}
        more = not found <= ours
        ours |= found
    return "\n".join(line for line in lines if int(line.split()[0]) in ours)
