"""What a user sees of a record: one rule for sockets, server-sent events and JSON.

`ECHOMQ["MASK"]` is a callable `(user, stream) -> Mask | None`, sync or async. What it
raises, and what a mask raises, ends the reading: nothing is ever sent unmasked instead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import Any, cast

from asgiref.sync import async_to_sync
from django.utils.module_loading import import_string

from ..conf import current
from .identity import Identity
from .items import Mask
from .visits import in_shared_visit

Rule = Callable[[Any, str], Mask | Awaitable[Mask | None] | None]


async def mask_of(identity: Identity, stream: str) -> Mask | None:
    """Ask the rule what this user sees of the stream's records; `None`: all of them, whole."""
    rule = mask_rule()
    if rule is None:
        return None
    if iscoroutinefunction(rule):
        return cast(Mask | None, await rule(identity.user, stream))
    return await _outcome(await in_shared_visit(partial(rule, identity.user, stream)))


def mask_in_view(identity: Identity, stream: str) -> Mask | None:
    """See `mask_of`: for sync code."""
    rule = mask_rule()
    if rule is None:
        return None
    answer = rule(identity.user, stream)
    return async_to_sync(_outcome)(answer) if isawaitable(answer) else answer


def mask_rule() -> Rule | None:
    """Return the rule in force, if there is one; `ImportError` for a path that leads nowhere."""
    rule = current().MASK
    return cast(Rule | None, import_string(rule) if isinstance(rule, str) else rule)


async def _outcome(answer: Mask | Awaitable[Mask | None] | None) -> Mask | None:
    return await answer if isawaitable(answer) else answer
