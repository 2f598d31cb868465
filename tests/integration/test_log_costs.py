"""What the log's verbs cost doesn't grow with the stream: look-ups in an index, all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import pytest
from django.test import Client

from echomq_app.stream import Stream
from tests.costs import (
    analyze,
    cost_of,
    entries_of,
    filled_by_sql,
    one_record_in_each,
    streams_by_sql,
)

pytestmark = pytest.mark.django_db(transaction=True)

SMALL, LARGE = 600, 60_000

_number = count()


def _new(stream: Stream) -> None:
    stream.append(1, idempotency_key=f"new {next(_number)}")


def _known(stream: Stream) -> None:
    assert stream.append(1, idempotency_key="i5").duplicate


def _new_and_known(stream: Stream) -> None:
    new = [{"data": n, "idempotency_key": f"new {next(_number)}"} for n in range(100)]
    known = [{"data": n, "idempotency_key": f"i{n}"} for n in range(100)]
    receipts = stream.append_many([*new, *known])
    assert [receipt.duplicate for receipt in receipts] == [False] * 100 + [True] * 100


def _by_key(stream: Stream) -> None:
    page = stream.read(key="k5", limit=100)
    assert len(page.records) == 6 and page.caught_up


VERBS = (_new, _known, _new_and_known, _by_key)


def _compare(verb: Callable[[Stream], None], small: Stream, large: Stream) -> None:
    """Require that the verb costs at most twice as much on the large stream."""
    costs = []
    for stream in (small, large):
        for _ in range(7):  # PostgreSQL plans the first five calls of a function by their values
            verb(stream)
        call = partial(verb, stream)
        costs.append((cost_of(call), entries_of(call)))
    (few_blocks, few_entries), (blocks, entries) = costs
    assert blocks <= 2 * few_blocks and entries <= 2 * few_entries, costs


@pytest.mark.parametrize("verb", VERBS)
def test_a_hundred_times_as_many_records_cost_no_more(verb: Callable[[Stream], None]) -> None:
    small = filled_by_sql("small", SMALL, keys=SMALL // 6)
    large = filled_by_sql("large", LARGE, keys=LARGE // 6)
    analyze()
    _compare(verb, small, large)


@pytest.mark.parametrize("verb", VERBS)
def test_nor_among_streams_of_one_record(verb: Callable[[Stream], None]) -> None:
    """There the planner expects that any index that begins with the stream will do."""
    streams_by_sql("tiny", 20_000)
    one_record_in_each()
    small = filled_by_sql("small", SMALL, keys=SMALL // 6)
    large = filled_by_sql("large", LARGE // 3, keys=LARGE // 18)
    analyze()
    _compare(verb, small, large)


def test_the_admin_looks_for_a_type_in_a_window(admin_client: Client) -> None:
    """SQLite looked up the stream's first position, and read from there to the window."""
    filled_by_sql("small", 11_000)
    filled_by_sql("large", 60_000)
    analyze()

    def look(stream: str) -> None:
        page = admin_client.get(f"/admin/echomq/record/?stream={stream}&type=none")
        assert page.status_code == 200

    look("small")
    cheap = cost_of(partial(look, "small"))
    assert cost_of(partial(look, "large")) <= 1.5 * cheap


def test_a_batch_costs_what_the_one_before_it_cost() -> None:
    """Keyed batches got slower, each by what all those before it had written."""
    stream = Stream("orders")

    def batch() -> None:
        stream.append_many(
            [{"data": n, "idempotency_key": f"key {next(_number)}"} for n in range(500)]
        )

    first, *_, last = [entries_of(batch) for _ in range(8)]
    assert last <= 2 * first
