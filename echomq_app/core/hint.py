"""What waits for the commit of a transaction: a wake-up, events to publish."""

from __future__ import annotations

from collections.abc import Callable


class Hint:
    """A callback for `transaction.on_commit` that runs once.

    In a test that never commits, `echomq_app.testing.capture_events` runs it; Django's own
    `captureOnCommitCallbacks` may come before or after that.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()
