"""The cooperative cancel: ask work to stop, and let the work decide when.

    token = cancel.new()
    ...
    cancel.cancel(token, "the user closed the page")    # anywhere in this process
    ...
    for item in items:
        cancel.check_or_raise(token)                    # a safe point of the handler
        process(item)

A cancel asks. Nothing is injected and nothing is killed: a handler that never checks
its token completes normally, an async one too. A token has an identity and nothing
else: it can't be pickled, copied or compared by value, and no other process can see
it (`jobs.control` carries a cancel across processes). Cancelled is for good: the
first reason stays, and every later check answers the same.

All of it is safe from any thread, task or signal handler (see `core/wakers.py` for
how). What `on_cancel` callbacks do in a signal handler is their own affair.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import NoReturn, Self

from .core.deadlines import Deadlines
from .core.wakers import Wakers
from .exceptions import JobCancelled

__all__ = ["CancelToken", "Cancelled", "JobCancelled", "cancel", "check", "check_or_raise", "new"]

_deadlines = Deadlines()


@dataclasses.dataclass(frozen=True, slots=True)
class Cancelled:
    """The answer of a check that found a cancel. Always true; `reason` may be None."""

    reason: str | None = None
    kind: str = "user"
    """Who asked: see `CancelToken.kind`."""


class CancelToken:
    """Names one cancellation in this process. Make it with `cancel.new()`."""

    # `_state` is what a check reads: one attribute, so a check costs what
    # `threading.Event.is_set` costs. `_first` decides who cancels: `setdefault` is
    # atomic, so every caller ends up with the same Cancelled, whoever was first.
    __slots__ = ("__weakref__", "_children", "_first", "_parent", "_state", "_wakers")

    def __init__(self) -> None:
        self._parent: CancelToken | None = None
        self._state: Cancelled | None = None
        self._first: dict[str, Cancelled] = {}
        self._wakers = Wakers()
        self._children: dict[int, weakref.ref[CancelToken]] = {}

    @property
    def cancelled(self) -> bool:
        """Whether somebody has cancelled this token, or one that it descends from."""
        return self._state is not None

    @property
    def reason(self) -> str | None:
        """The first reason, or None when not cancelled or cancelled without one."""
        state = self._state
        return None if state is None else state.reason

    @property
    def kind(self) -> str | None:
        """Who asked first, or None when not cancelled.

        `deadline` for a deadline that passed. In a job also `timeout` (the job's own),
        `shutdown` and `lease_lost` (of its worker). Otherwise what the caller said: `user`.
        """
        state = self._state
        return None if state is None else state.kind

    def cancel(self, reason: str | None = None, kind: str = "user") -> None:
        """Mark this token and its children as cancelled, then run their callbacks.

        Does nothing when it is cancelled already. When it returns, every check of
        this token and its children says so. Callbacks run here, in the caller's
        thread, newest first; their exceptions are logged.
        """
        tree = [self]
        for token in tree:  # Grows while we walk it: no recursion, however deep.
            token._mark(reason, kind)
            tree.extend(token._take_children())
        for token in tree:
            token._wakers.run()

    def raise_if_cancelled(self) -> None:
        """Raise `JobCancelled` with the reason if this token is cancelled."""
        state = self._state
        if state is not None:
            raise JobCancelled(state.reason, state.kind)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until cancelled, at most `timeout` seconds; tell whether it is.

        The interruptible sleep of a sync handler: `if token.wait(30): return`.
        """
        return self._wakers.wait(self._is_cancelled, timeout)

    async def wait_async(self) -> Cancelled:
        """Suspend the task until cancelled. Cancelling the task loses nothing."""
        await self._wakers.wait_async(self._is_cancelled, None)
        state = self._state
        if state is None:
            raise RuntimeError("A wait without a timeout has ended without a cancel.")
        return state

    def on_cancel(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` once when this token is cancelled; return the way to forget it.

        Called in the thread that cancels, or here and now if the token is cancelled
        already. Exceptions are logged, never raised. After forgetting it, a callback
        that another thread has begun runs to its end.
        """
        wakers = self._wakers
        handle = wakers.add(callback)
        if self._state is not None:
            wakers.run_one(handle)

        def unregister() -> None:
            wakers.discard(handle)

        return unregister

    def child(self) -> Self:
        """Return a token that is cancelled with this one, and may be on its own.

        This token holds its children weakly: dropping a child is enough.
        """
        token = type(self)()
        token._parent = self  # Keeps the way from the grandparent down alive.
        self._children[id(token)] = weakref.ref(token)
        state = self._state
        if state is not None:
            self._children.pop(id(token), None)
            token.cancel(state.reason, state.kind)
        return token

    def with_deadline(
        self, seconds: float, reason: str | None = None, kind: str = "deadline"
    ) -> Self:
        """Return a child that is cancelled when `seconds` have passed.

        The default reason says so. One thread serves all deadlines of the process.
        `math.inf` is no deadline; zero or less has passed already.
        """
        if math.isnan(seconds):
            raise ValueError("A deadline needs a number of seconds, not NaN.")
        token = self.child()
        if reason is None:
            reason = f"deadline of {seconds:g} s passed"
        if seconds <= 0:
            token.cancel(reason, kind)
        elif seconds != math.inf:
            _deadlines.add(seconds, token, reason, kind)
        return token

    def __del__(self) -> None:
        # Instead of a callback of the weak reference: see core/deadlines.py. The id is
        # nobody else's before this has returned.
        parent = self._parent
        if parent is not None:
            parent._children.pop(id(self), None)

    def __repr__(self) -> str:
        state = self._state
        how = "live" if state is None else f"cancelled, reason={state.reason!r}"
        return f"<{type(self).__name__} {how} at {id(self):#x}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "A CancelToken is an identity in this process: it can't be pickled or copied. "
            "Send the job's id, and cancel with jobs.control.cancel(job_id, reason)."
        )

    def _is_cancelled(self) -> bool:
        return self._state is not None

    def _mark(self, reason: str | None, kind: str) -> None:
        if self._state is None:
            self._state = self._first.setdefault("state", Cancelled(reason, kind))

    def _take_children(self) -> list[CancelToken]:
        taken: list[CancelToken] = []
        while True:
            try:
                _, reference = self._children.popitem()
            except KeyError:
                return taken
            token = reference()
            if token is not None:
                taken.append(token)


def new() -> CancelToken:
    """Mint a token that nobody has cancelled."""
    return CancelToken()


def cancel(token: object, reason: str | None = None, kind: str = "user") -> None:
    """Ask whoever checks `token` to stop. Always returns None, and never raises.

    A token that is cancelled already, whose work has finished, or that is no token at
    all is left alone: there is nobody to ask.
    """
    if isinstance(token, CancelToken):
        token.cancel(reason, kind)


def check(token: CancelToken) -> Cancelled | None:
    """Return `Cancelled(reason)` if `token` is cancelled, else None. Never blocks."""
    return token._state


def check_or_raise(token: CancelToken) -> None:
    """Raise `JobCancelled` with the reason if `token` is cancelled."""
    state = token._state
    if state is not None:
        raise JobCancelled(state.reason, state.kind)
