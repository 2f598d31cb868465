"""Which threads a test has left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from asgiref.sync import SyncToAsync


def lasting_threads(*, since: Iterable[threading.Thread]) -> set[threading.Thread]:
    """Return the non-daemon threads that run now and are not among `since`.

    Without asgiref's: `sync_to_async` keeps one thread per process for good.
    """
    kept = set(SyncToAsync.single_thread_executor._threads)
    new = set(threading.enumerate()) - set(since)
    return {thread for thread in new if not thread.daemon and thread not in kept}
