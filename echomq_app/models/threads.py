"""Database work from async code: in a thread, because Django's ORM is sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections

P = ParamSpec("P")
T = TypeVar("T")


async def in_database_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a sync call in the thread that `sync_to_async` uses, and return its result.

    Closes connections that are worn out, before and after, like Channels'
    `database_sync_to_async`; but none that is in a transaction: in a `TestCase` that is
    the whole test's.
    """

    def tidily() -> T:
        close_old_connections()
        try:
            return call(*args, **kwargs)
        finally:
            close_old_connections()

    return await sync_to_async(tidily)()


def close_old_connections() -> bool:
    """Close this thread's connections that are broken or too old; tell whether any was.

    None that is in a transaction.
    """
    closed = False
    for connection in connections.all(initialized_only=True):
        if connection.connection is not None and not connection.in_atomic_block:
            connection.close_if_unusable_or_obsolete()
            closed |= connection.connection is None
    return closed
