"""What users need in their tests: appends on commit that are seen inside a TestCase."""

from __future__ import annotations

import pytest
from django.db import connection, transaction
from django.test import TestCase

from echomq_app.exceptions import IsolationError, UnknownStream
from echomq_app.models import Outbox, appending
from echomq_app.stream import Stream
from echomq_app.testing import flush_outbox


def data(name: str = "orders") -> list[object]:
    return [record.data for record in Stream(name).replay()]


class TestInsideATestCase(TestCase):
    def test_flush_as_often_as_you_like(self) -> None:
        Stream("orders").append_on_commit(0)
        if connection.vendor == "postgresql":
            with pytest.raises(UnknownStream):
                Stream("orders").read()
        flush_outbox()
        assert data() == [0]
        Stream("orders").append_on_commit(1)
        Stream("orders").append_on_commit(2)
        flush_outbox()
        flush_outbox()
        assert data() == [0, 1, 2]
        assert not Outbox.objects.exists()

    def test_what_is_left_to_the_relay_in_production(self) -> None:
        with transaction.atomic():
            appending.append_on_commit("default", "emq.mail", [b'{"data": 1}'], 5.0)
        flush_outbox()
        assert data("emq.mail") == [1]

    def test_nothing_to_flush(self) -> None:
        flush_outbox()
        flush_outbox("default")

    def test_rolled_back_savepoints_are_not_flushed(self) -> None:
        with transaction.atomic():
            Stream("orders").append_on_commit(-1)
            transaction.set_rollback(True)
        Stream("orders").append_on_commit(0)
        flush_outbox()
        assert data() == [0]


@pytest.mark.django_db(transaction=True)
@pytest.mark.postgres
def test_says_what_to_do_under_serializable() -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        with pytest.raises(IsolationError, match="outside this transaction"):
            flush_outbox()


@pytest.mark.django_db(transaction=True)
def test_outside_a_transaction_there_is_little_to_do() -> None:
    Stream("orders").append_on_commit(0)
    flush_outbox()
    assert data() == [0]
