"""The statements that the package sends to its tables in this run, and what one of them reads.

A plugin: every connection, those of the package's own threads too, gets a wrapper that keeps a
few samples of each statement that code of the package issues (`collected`). `tests.integration.
test_plans`, which runs last, measures them on large tables.

What is measured doesn't depend on the machine: on PostgreSQL how many index entries and rows a
statement makes the server read, inside functions and triggers too, and dead ones too; on SQLite
how many steps of its virtual machine it takes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import django.contrib.admin
import pytest
from django.db import DatabaseError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.signals import connection_created

SAMPLES = 3
"""Of each statement, with the parameters of its first calls."""
LONGEST_SAMPLE = 100_000
"""Characters: a statement with more is kept, if none was before."""
LAST = "test_plans.py"
FEW = 5_000
"""Rows that no plan needs an index for: of jobs that run, workers, queues."""

ROOT = Path(__file__).resolve().parent.parent
OURS = (f"{ROOT}/echomq_app/", f"{Path(django.contrib.admin.__file__).parent}/")
"""Whose code issues statements: the package's, and the admin's on its behalf."""
NOT_OURS = (f"{ROOT}/tests/", f"{ROOT}/project/", f"{ROOT}/echomq_app/migrations/")

Sample = tuple[str, Any]
Visit = Callable[[BaseDatabaseWrapper, str, Any], None]

collected: dict[str, list[Sample]] = {}
_visit: Visit | None = None
_inside = threading.local()


def pytest_configure(config: pytest.Config) -> None:
    connection_created.connect(_watch, dispatch_uid="tests.statements")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what looks at the whole run's statements when there will be no more."""
    items.sort(key=lambda item: item.path.name == LAST)


@contextmanager
def visiting(visit: Visit) -> Iterator[None]:
    """Call `visit` with each statement of the package before it runs, while the block lasts."""
    global _visit  # noqa: PLW0603
    _visit = visit
    try:
        yield
    finally:
        _visit = None


def fingerprint(sql: str) -> str:
    """Return what statements have in common that differ by how many values they are given."""
    text = " ".join(sql.split())
    text = re.sub(r"%s(, %s)+", "%s", text)
    text = re.sub(r"\(%s\)(, \(%s\))+", "(%s)", text)
    return re.sub(r"\b(LIMIT|OFFSET) \d+", r"\1 n", text)


def _watch(connection: BaseDatabaseWrapper, **kwargs: Any) -> None:
    if _wrapper not in connection.execute_wrappers:
        # At the front: `execute_wrapper` takes the last one for its own.
        connection.execute_wrappers.insert(0, _wrapper)


def _wrapper(execute: Any, sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
    if _is_query(sql) and not getattr(_inside, "visit", False) and _is_issued_by_the_package():
        sample = next(iter(params), None) if many else params
        if not many or sample is not None:
            _keep(sql, sample)
        if _visit is not None and (not many or sample is not None):
            _inside.visit = True
            try:
                _visit(context["connection"], sql, sample)
            finally:
                _inside.visit = False
    return execute(sql, params, many, context)


def _is_query(sql: Any) -> bool:
    if not isinstance(sql, str) or "echomq_" not in sql:
        return False
    first = sql.lstrip(" \n(")[:6].upper()
    return first in {"SELECT", "INSERT", "UPDATE", "DELETE"} or first.startswith("WITH")


def _is_issued_by_the_package() -> bool:
    frame = sys._getframe(2)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_filename
        if name.startswith(NOT_OURS):
            return False
        if name.startswith(OURS):
            return True
    return False


def _keep(sql: str, params: Any) -> None:
    samples = collected.setdefault(fingerprint(sql), [])
    if len(samples) < SAMPLES and not (samples and len(str(params)) > LONGEST_SAMPLE):
        samples.append((sql, params))


# What one of them reads


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a statement cost, and how the database means to go about it."""

    entries: int = 0
    """Index entries and rows that were read (PostgreSQL)."""
    steps: int = 0
    """Of the virtual machine (SQLite)."""
    scanned: frozenset[str] = frozenset()
    """Large tables that were read from one end on, without an index."""
    walked: frozenset[str] = frozenset()
    """Large indexes that are read from one end on for rows that match (PostgreSQL)."""
    plan: str = ""


def measure(connection: BaseDatabaseWrapper, sql: str, params: Any) -> Reading | None:
    """Run a statement and take it back; `None` if the database refuses it."""
    read = _on_postgresql if connection.vendor == "postgresql" else _on_sqlite
    try:
        with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
            reading = read(connection, cursor, sql, params)
            transaction.set_rollback(True, using=connection.alias)
    except DatabaseError:
        return None
    return reading


# Of this transaction alone, and by now: nothing of other sessions, nothing late.
_COUNTERS = """
    SELECT relname, relkind = 'r', pg_stat_get_xact_numscans(oid),
           pg_stat_get_xact_tuples_returned(oid), reltuples
    FROM pg_class WHERE relname LIKE 'echomq%%' AND relkind IN ('r', 'i')
"""


def _on_postgresql(connection: Any, cursor: Any, sql: str, params: Any) -> Reading:
    cursor.execute("SET LOCAL max_parallel_workers_per_gather = 0")  # others' counters are theirs
    cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}", params)
    (((found,),),) = cursor.fetchall()
    plan = json.loads(found) if isinstance(found, str) else found
    cursor.execute(_COUNTERS)
    before = {row[0]: row[2:4] for row in cursor.fetchall()}
    cursor.execute(sql, params)
    if cursor.description:
        cursor.fetchall()
    cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # what would be done at the commit
    cursor.execute(_COUNTERS)
    entries, scanned, large = 0, set(), set()
    for name, is_table, scans, rows, size in cursor.fetchall():
        entries += rows - before[name][1]
        if is_table and scans > before[name][0]:
            scanned.add(name)
        if size > FEW:
            large.add(name)
    return Reading(
        entries=entries,
        scanned=frozenset(scanned & large),
        walked=frozenset(_walks(plan["Plan"])) & large,
        plan="\n".join(_lines(plan["Plan"])),
    )


def _walks(node: dict[str, Any]) -> Iterator[str]:
    if "Index Name" in node and "Index Cond" not in node and "Filter" in node:
        yield node["Index Name"]
    for child in node.get("Plans", ()):
        yield from _walks(child)


def _lines(node: dict[str, Any], depth: int = 0) -> Iterator[str]:
    wanted = ("Node Type", "Relation Name", "Index Name", "Index Cond", "Filter")
    yield "  " * depth + " | ".join(str(node[name]) for name in wanted if name in node)
    for child in node.get("Plans", ()):
        yield from _lines(child, depth + 1)


def _is_large(cursor: Any, table: str) -> bool:
    cursor.execute(f"SELECT count(*) FROM (SELECT 1 FROM {table} LIMIT {FEW + 1})")
    return bool(cursor.fetchone()[0] > FEW)


_STEPS_AT_ONCE = 100
_TABLE = re.compile(r'"?\b(echomq_\w+)"?(?: (?:AS )?(?!WHERE|SET|USING|ON|JOIN|LEFT)"?(\w+)"?)?')


def _on_sqlite(connection: Any, cursor: Any, sql: str, params: Any) -> Reading:
    cursor.execute(f"EXPLAIN QUERY PLAN {sql}", params)
    plan = [row[3] for row in cursor.fetchall()]
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += _STEPS_AT_ONCE

    connection.connection.set_progress_handler(count, _STEPS_AT_ONCE)
    try:
        cursor.execute(sql, params)
        cursor.fetchall()
    finally:
        connection.connection.set_progress_handler(None, 0)
    tables: dict[str, str] = {alias or table: table for table, alias in _TABLE.findall(sql)}
    scans = [match[1] for match in map(re.compile(r"SCAN (\w+)").fullmatch, plan) if match]
    scanned = {table for table in map(tables.get, scans) if table and _is_large(cursor, table)}
    return Reading(
        steps=steps,
        scanned=frozenset(scanned),
        plan="\n".join(plan),
    )
