"""The project under an ASGI server: `uvicorn project.asgi:application`."""

from __future__ import annotations

import os

from channels.routing import ProtocolTypeRouter, URLRouter
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")

# Static files come from the apps' own folders, without collectstatic: fit for the
# demo and for tests. In production a front server has them, and this wrapper goes.
pages = ASGIStaticFilesHandler(get_asgi_application())

# These import models, so only after the application above has set Django up.
import project.seismic.routing as seismic  # noqa: E402
from echomq_app.routing import http, websocket_urlpatterns  # noqa: E402

application = ProtocolTypeRouter(
    {
        # Server-sent events, at the address that urls.py gives them; then all of Django.
        "http": http(pages),
        # EchoMQ's own socket finds out by itself who is there, and what page they are on.
        "websocket": URLRouter([*websocket_urlpatterns, *seismic.websocket_urlpatterns]),
    }
)
