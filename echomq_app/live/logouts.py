"""Logouts in this process, heard at once. Those elsewhere are found by asking again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from django.contrib.auth.signals import user_logged_out

from ..conf import current

logger = logging.getLogger("echomq.live")

LogoutCallback = Callable[[Any], None]

_callbacks: set[LogoutCallback] = set()

# Django tells of a logout before it removes the session, so a look into the store right then
# would still find it. A logout that is rolled back costs its pages one interval.
_ended: dict[str, float] = {}


def on_logout(callback: LogoutCallback) -> Callable[[], None]:
    """Have `callback` called with the primary key of each user who logs out in this process.

    In the thread that logs out, so it should only pass it on. From then on their session
    isn't valid here. Returns the function that ends it.
    """
    _callbacks.add(callback)
    return lambda: _callbacks.discard(callback)


def just_ended(session_key: str) -> bool:
    """Tell whether somebody logged out of this session in the last `AUTHORIZE_INTERVAL`."""
    until = _ended.get(session_key)
    return until is not None and time.monotonic() < until


def _logged_out(*, request: Any = None, user: Any = None, **kwargs: Any) -> None:
    key = getattr(getattr(request, "session", None), "session_key", None)
    if key:
        now = time.monotonic()
        for old in [old for old, until in list(_ended.items()) if until <= now]:
            _ended.pop(old, None)
        _ended[key] = now + current().AUTHORIZE_INTERVAL
    if user is not None:
        for callback in list(_callbacks):
            try:
                callback(user.pk)
            except Exception:  # neither the logout nor the other pages are to blame
                logger.exception("event=logout_callback_failed")


user_logged_out.connect(_logged_out, dispatch_uid="echomq.live")
