"""No statement reads more where the tables are larger: each is measured on large ones.

Runs last, and measures what the run has issued so far beside what the tour issues.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper
from django.test import Client

from tests import statements, tour
from tests.databases import session
from tests.large_tables import fill
from tests.statements import Reading, fingerprint, measure

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(600)]

MOST_ENTRIES = 12_500
"""A read with a filter looks at 10,000 records, a trim deletes 5,000 at once."""
MOST_STEPS = 700_000
"""What the same takes on SQLite, with a hundred steps for a record that is deleted."""

EXCEPTIONS = {
    "both": {
        r'LENGTH\("echomq_outbox"\."keys"\).* LIMIT n$': "any rows will do, so many and no more",
        r'^SELECT "echomq_job"\."id" AS "pk" .*"state" IN \(%s\).* ORDER BY 1 ASC LIMIT n$': (
            "cancel_many, by hand: looks at each job once, in pages; known, to be given indexes"
        ),
        r'FROM "echomq_job" WHERE "echomq_job"\."(queue|task_path|group_key|state)" = %s'
        r' ORDER BY "echomq_job"\."id" DESC LIMIT n$': (
            "lists of jobs, for a person who waits; known, to be windowed or given indexes"
        ),
    },
    "postgresql": {
        r'SELECT MIN.* FROM \(SELECT "echomq_job"': (
            "the admin's window of 25,000 jobs; known for a state, which is to have an index"
        ),
        r'"state" = %s AND "echomq_job"\."queue" = %s AND "echomq_job"\."id" >= %s': "the same",
    },
    "sqlite": {
        r"UPDATE echomq_job SET parked = parked WHERE id IS NULL": "only locks: no id is null",
    },
}
"""What a statement reads like, and why it may scan, or read much."""
ELSEWHERE = {
    r'SELECT DISTINCT "echomq_outbox"\."stream"': "the relay of all that waits, by hand",
    r'^SELECT DISTINCT "echomq_job"\."queue"': "run_jobs, in a project's own tests",
    r'^SELECT COUNT\(\*\) AS "__count" FROM "echomq_job"$': (
        "by Django or by a test: no code of ours counts jobs"
    ),
    r'"oldest_at" FROM "echomq_stream" ORDER BY "echomq_stream"\."name" ASC$': (
        "echomq_stream list without a prefix: known, to be streamed and limited"
    ),
}
"""The same, of what the tour doesn't issue."""


def test_no_statement_reads_more_in_larger_tables(
    admin_client: Client, pytestconfig: pytest.Config
) -> None:
    excused = {**EXCEPTIONS["both"], **EXCEPTIONS[connection.vendor]}
    issued = dict(statements.collected)
    fill(connection)
    offenders: dict[str, str] = {}

    def visit(wrapper: BaseDatabaseWrapper, sql: str, params: Any) -> None:
        reading = measure(wrapper, sql, params)
        fault = reading and _fault(reading)
        if reading and fault:
            offenders.setdefault(fingerprint(sql), f"{fault}\n{params!s:.300}\n{reading.plan}")

    with statements.visiting(visit):
        tour.run(admin_client, _held_snapshot)
    for samples in issued.values():
        for sql, params in samples:
            visit(connection, sql, params)
    found = [
        text
        for text in offenders
        if not any(re.search(one, text) for one in (*excused, *ELSEWHERE))
    ]
    assert not found, "\n\n".join(f"{text}\n{offenders[text]}" for text in found)
    if _is_whole_run(pytestconfig):
        for pattern in excused:
            known = any(re.search(pattern, text) for text in statements.collected)
            assert known, f"an exception for a statement that isn't there any more: {pattern}"


def _is_whole_run(config: pytest.Config) -> bool:
    from_settings = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return from_settings and not config.option.keyword and not hasattr(config, "workerinput")


def _fault(reading: Reading) -> str:
    faults = [
        *(f"scans {name}" for name in sorted(reading.scanned)),
        *(f"walks {name}" for name in sorted(reading.walked)),
    ]
    if reading.entries > MOST_ENTRIES or reading.steps > MOST_STEPS:
        faults.append(f"reads {reading.entries:,} entries in {reading.steps:,} steps")
    return ", ".join(faults)


@contextlib.contextmanager
def _held_snapshot() -> Iterator[None]:
    """Keep what is deleted in PostgreSQL's tables, as a backup that runs does."""
    if connection.vendor != "postgresql":
        yield
        return
    with session() as other:
        other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        other.execute("SELECT 1 FROM echomq_stream LIMIT 1")
        yield
