"""What a project needs in its own tests of code that uses this app."""

from __future__ import annotations

from django.db import connections, router

from .models import Outbox, Record, appending
from .models.transactions import in_transaction, refuse_old_snapshot

__all__ = ["flush_outbox"]


def flush_outbox(using: str | None = None) -> None:
    """Append now what the open transaction would append when it commits.

    A `TestCase` never commits, so what `append_on_commit` wrote would not be seen in it.
    Records of jobs (`emq.<queue>`) are appended too. The streams' locks are held from here to
    the end of the test. May be called any number of times. Does nothing on SQLite, where
    `append_on_commit` is `append`. Raises `IsolationError` under REPEATABLE READ and
    SERIALIZABLE: use a `TransactionTestCase` there.
    """
    alias = using or router.db_for_write(Record)
    connection = connections[alias]
    if connection.vendor != "postgresql":
        return
    refuse_old_snapshot(alias, "flush_outbox()")
    if in_transaction(connection):
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS echomq_outbox_commit_v1 IMMEDIATE")
            cursor.execute("SET CONSTRAINTS echomq_outbox_commit_v1 DEFERRED")
    left = Outbox.objects.using(alias).order_by("stream")
    for name in left.values_list("stream", flat=True).distinct():
        while appending.relay(alias, name, 1_000):
            pass
