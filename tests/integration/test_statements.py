"""How many statements a verb costs on PostgreSQL, counted in the server's own log.

What the server logs is what came over the wire: BEGIN, COMMIT and savepoints too, which
Django's query log leaves out in part.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator

import pytest
from django.db import connection, transaction

from echomq_app.exceptions import WrongExpectedCursor
from echomq_app.stream import Stream
from tests.servers import Postgres

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

STATEMENT = re.compile(r"LOG: +(?:statement|execute [^:]*): (.*)")

Statements = Callable[[Callable[[], object]], list[str]]


@pytest.fixture
def statements(postgres_server: Postgres) -> Iterator[Statements]:
    """Give a function that calls and returns what this session sent meanwhile."""
    log = postgres_server.child.log
    assert log is not None
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        (pid,) = cursor.fetchone()

    def mark() -> str:
        text = f"SELECT '{uuid.uuid4()}'"
        with connection.cursor() as cursor:
            cursor.execute(text)
        return text

    def sent(call: Callable[[], object]) -> list[str]:
        first = mark()
        call()
        last = mark()
        lines = [line for line in log.read_text().splitlines() if f"[{pid}]" in line]
        found = [match[1] for match in map(STATEMENT.search, lines) if match]
        return found[found.index(first) + 1 : found.index(last)]

    with connection.cursor() as cursor:
        cursor.execute("SET log_statement = 'all'")
    yield sent
    with connection.cursor() as cursor:
        cursor.execute("RESET log_statement")


@pytest.fixture
def orders() -> Stream:
    stream = Stream("orders")
    stream.append({"n": 0}, idempotency_key="first")
    return stream


def test_append_is_one_statement(statements: Statements, orders: Stream) -> None:
    (only,) = statements(lambda: orders.append({"n": 1}, type="placed", key="7"))
    assert "echomq_append_v1('orders'" in only


def test_append_to_a_new_stream_is_one_statement(statements: Statements) -> None:
    assert len(statements(lambda: Stream("new").append({"n": 0}))) == 1


def test_append_many_is_one_statement(statements: Statements, orders: Stream) -> None:
    records = [{"data": {"n": n}} for n in range(1_000)]
    assert len(statements(lambda: orders.append_many(records))) == 1
    assert orders.info().count == 1_001


def test_idempotent_append_is_one_statement(statements: Statements, orders: Stream) -> None:
    assert len(statements(lambda: orders.append({"n": 1}, idempotency_key="a"))) == 1
    assert len(statements(lambda: orders.append({"n": 0}, idempotency_key="first"))) == 1
    assert orders.info().count == 2


def test_conflict_is_one_statement(statements: Statements, orders: Stream) -> None:
    def conflict() -> None:
        with pytest.raises(WrongExpectedCursor):
            orders.append({"n": 1}, expected_cursor=7)

    assert len(statements(conflict)) == 1


def test_append_in_a_transaction_adds_one_statement(statements: Statements, orders: Stream) -> None:
    def in_transaction() -> None:
        with transaction.atomic():
            orders.append({"n": 1})
            orders.append_on_commit({"n": 2})

    begin, append, on_commit, commit = statements(in_transaction)
    assert (begin, commit) == ("BEGIN", "COMMIT")
    assert "echomq_append_v1" in append and "echomq_append_on_commit_v1" in on_commit
    assert orders.info().count == 3


def test_a_page_is_one_statement(statements: Statements, orders: Stream) -> None:
    token = orders.info().token
    assert len(statements(lambda: orders.read(token))) == 1
    assert len(statements(lambda: orders.read(types=["placed"], key="7"))) == 1
    assert len(statements(orders.info)) == 1
