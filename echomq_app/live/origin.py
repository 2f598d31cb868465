"""Which site the page is of that opens a connection."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import DisallowedHost
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest
from django.utils.http import is_same_domain

from ..conf import project_setting

_SCHEMES = {"ws": "http", "wss": "https"}


def request_of(scope: Mapping[str, Any]) -> ASGIRequest:
    """Return an ASGI scope, also a websocket's, as Django sees a request: host, cookies, path."""
    scheme = scope.get("scheme", "http")
    return ASGIRequest(
        {
            "method": "GET",
            **scope,
            "scheme": _SCHEMES.get(scheme, scheme),
            "query_string": b"",  # may be any bytes; nothing here reads it
        },
        io.BytesIO(),
    )


def origin_allowed(scope: Mapping[str, Any]) -> bool:
    """Tell whether the page that opens this connection may use our cookies.

    Django's rule for CSRF: the page is of the host that it asks, or of one in
    `CSRF_TRUSTED_ORIGINS`. A websocket has to say (browsers always do). A plain request
    needn't: browsers leave `Origin` out within a site, and what a page of another site may
    read is up to CORS.
    """
    return is_ours(request_of(scope), must_say=scope["type"] == "websocket")


def is_ours(request: HttpRequest, *, must_say: bool = False) -> bool:
    """See `origin_allowed`. `must_say`: without an `Origin` it is not."""
    origin = request.headers.get("Origin")
    if origin is None:
        foreign = request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
        return not (must_say or foreign)
    with contextlib.suppress(DisallowedHost):
        if origin == f"{request.scheme}://{request.get_host()}":
            return True
    return _is_trusted(origin, project_setting("CSRF_TRUSTED_ORIGINS"))


def _is_trusted(origin: str, trusted: list[str]) -> bool:
    if origin in trusted:
        return True
    try:
        page = urlsplit(origin)
    except ValueError:
        return False
    return any(
        page.scheme == entry.scheme and is_same_domain(page.netloc, entry.netloc.lstrip("*"))
        for entry in map(urlsplit, trusted)
        if "*" in entry.netloc
    )
