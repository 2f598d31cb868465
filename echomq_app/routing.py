"""What goes into `asgi.py`.

application = ProtocolTypeRouter(
    {
        "http": http(get_asgi_application()),
        "websocket": URLRouter(websocket_urlpatterns),
    }
)
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from django.urls import Resolver404, path, resolve

from .live import sse
from .live.consumers import EchoConsumer
from .live.origin import request_of
from .urls import app_name

Application = Callable[[Any, Any, Any], Awaitable[None]]

websocket_urlpatterns: list[Any] = [
    path("ws/echomq/", EchoConsumer.as_asgi()),  # type: ignore[arg-type]  # Channels reads it
]
"""For Channels' `URLRouter`. The socket needs no `AuthMiddlewareStack` and no origin validator
around it, and works in them."""


def http(application: Application) -> Application:
    """Put server-sent events in front of Django's ASGI application.

    They are where the URL configuration has `echomq_app.urls`; all else goes to `application`.
    """

    async def application_with_events(scope: Any, receive: Any, send: Any) -> None:
        name = _stream_of(scope)
        if name is None:
            await application(scope, receive, send)
        else:
            await sse.serve(scope, name, receive, send)

    return application_with_events


def _stream_of(scope: Mapping[str, Any]) -> str | None:
    """Return the stream whose events this connection asks for."""
    if scope["type"] != "http" or scope["method"] != "GET":
        return None
    if not scope["path"].endswith("/events"):  # nearly all requests end here, cheaply
        return None
    try:
        match = resolve(request_of(scope).path_info)
    except Resolver404:
        return None
    if match.url_name != "events" or match.app_names[-1:] != [app_name]:
        return None
    return str(match.kwargs["name"])
