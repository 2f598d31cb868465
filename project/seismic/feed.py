"""The lossy feed as this page sees it."""

from __future__ import annotations

from echomq_app import engine


def crosses_processes() -> bool:
    """Tell whether an event of the worker can reach this process at all.

    Without a broker the feed ends at the process, and the replay runs in another one.
    """
    return engine.has_broker()
