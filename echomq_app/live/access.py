"""Who may read what from a page. Nothing is public unless the project says so.

A connection outlives the request that opened it, so what was true at its start is asked
again: `until_recheck` says when; `Identity.still_valid` and `allowed` look afresh each time.
A question that can't be answered (the database is away, a rule raises) is neither a yes nor a
no: nothing new is shown, and the question is asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Any, cast

from asgiref.sync import async_to_sync
from django.core.exceptions import PermissionDenied
from django.db import Error as DatabaseError
from django.utils.module_loading import import_string

from ..conf import current
from ..core.pace import Pace
from ..core.retry import full_jitter
from .identity import (
    NOBODY,
    Identity,
    bearer_token,
    identify,
    identify_token,
    identity_of,
    make_token,
)
from .logouts import on_logout
from .origin import origin_allowed, request_of
from .visits import in_shared_visit

__all__ = [
    "ANSWER_TIMEOUT",
    "NOBODY",
    "PERMISSIONS",
    "UNDECIDED",
    "Identity",
    "Undecided",
    "allowed",
    "allowed_in_view",
    "authorize_rule",
    "bearer_token",
    "complain",
    "doubt_is_over",
    "identify",
    "identify_token",
    "identity_of",
    "make_token",
    "on_logout",
    "origin_allowed",
    "request_of",
    "until_recheck",
]

logger = logging.getLogger("echomq")

PERMISSIONS = {"stream.read": "echomq.view_record", "events.read": "echomq.view_job"}
"""What the default rule asks for, by action."""

UNDECIDED = "The server can't tell right now whether this user may read. Try again soon."

ANSWER_TIMEOUT = 10.0
"""Seconds for the answer to one question: no answer by then is none."""
COMPLAINTS = 10.0
"""Seconds between two log lines about a database that doesn't answer, however many ask."""
_complaints = Pace(1.0)

Rule = Callable[[Any, str, str], bool | Awaitable[bool]]


class Undecided(Exception):
    """Nobody could tell whether a user may read: the database didn't answer, or a rule failed.

    Not a refusal. Ask again soon, and show nothing new until there is an answer.
    """


async def allowed(identity: Identity, action: str, target: str) -> bool:
    """Ask `ECHOMQ["AUTHORIZE"]` (by default Django's permissions) whether the user may read.

    `action` is `"stream.read"` or `"events.read"`, `target` the stream or the queue. The user
    is loaded afresh; one who is no longer valid may do nothing. A rule that raises Django's
    `PermissionDenied` denies; for any other error this logs it and raises `Undecided`. A rule
    that isn't async runs in a database thread.
    """
    try:
        rule = authorize_rule()
        if iscoroutinefunction(rule):
            user = await identity.reload()
            return user is not None and bool(await rule(user, action, target))
        answer = await in_shared_visit(partial(_decide, identity, action, target))
        return bool(await answer) if isawaitable(answer) else answer
    except PermissionDenied:
        return False
    except Exception as error:
        raise _undecided(error, action, target) from error


def allowed_in_view(identity: Identity, action: str, target: str) -> bool:
    """See `allowed`: for sync code."""
    try:
        answer = _decide(identity, action, target)
        return async_to_sync(_outcome)(answer) if isawaitable(answer) else answer
    except PermissionDenied:
        return False
    except Exception as error:
        raise _undecided(error, action, target) from error


def _undecided(error: Exception, action: str, target: str) -> Undecided:
    complain("authorize_failed", error, f"action={action} target={target!r:.100}")
    return Undecided(UNDECIDED)


def complain(event: str, error: BaseException, about: str = "") -> None:
    """Log why a question got no answer: a project's fault whole, the database's now and then."""
    if not isinstance(error, DatabaseError):
        logger.error("event=%s %s", event, about, exc_info=error)
    elif _complaints.due():
        _complaints.took(0, least=COMPLAINTS)
        logger.warning("event=%s %s error=%r", event, about, str(error).strip())


def _decide(identity: Identity, action: str, target: str) -> bool | Awaitable[bool]:
    user = identity.proof.load()
    if user is None:
        return False
    answer = authorize_rule()(user, action, target)
    # What a plain function returns may be a coroutine: true as an object, whatever it says.
    return answer if isawaitable(answer) else bool(answer)


async def _outcome(answer: Awaitable[bool]) -> bool:
    return bool(await answer)


def authorize_rule() -> Rule:
    """Return the rule in force; raise `ImportError` for a path that leads nowhere."""
    rule = current().AUTHORIZE
    if rule is None:
        return _has_permission
    return cast(Rule, import_string(rule) if isinstance(rule, str) else rule)


def doubt_is_over(since: float) -> bool:
    """Tell whether the last answer (`time.monotonic()`) is too old to go on without another."""
    return time.monotonic() - since > 2 * current().AUTHORIZE_INTERVAL


async def until_recheck(identity: Identity, *, undecided: int = 0) -> None:
    """Wait until it is time to ask again whether this connection may go on.

    That is after `AUTHORIZE_INTERVAL` at most (somewhat less, so that not all ask at once),
    when its token expires, or when its user logs out in this process. Soon, if it was asked
    `undecided` times without an answer.
    """
    if undecided:
        await asyncio.sleep(full_jitter(undecided, base=0.5, cap=5.0, random=random.random))
        return
    delay = current().AUTHORIZE_INTERVAL * random.uniform(0.75, 0.95)  # noqa: S311
    if identity.proof.expires_at is not None:
        delay = min(delay, max(0.0, identity.proof.expires_at - time.time()))
    loop, due = asyncio.get_running_loop(), asyncio.Event()

    def logged_out(pk: Any) -> None:
        if pk == identity.user.pk:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(due.set)

    unhook = on_logout(logged_out) if identity.authenticated else None
    try:
        # Not wait_for, which on Python 3.11 may swallow the cancellation when both come at once.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await due.wait()
    finally:
        if unhook is not None:
            unhook()


def _has_permission(user: Any, action: str, target: str) -> bool:
    permission = PERMISSIONS.get(action)
    return permission is not None and bool(user.has_perm(permission))
