"""The project under an ASGI server: `uvicorn project.asgi:application`."""

from __future__ import annotations

import os

from channels.routing import ProtocolTypeRouter, URLRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")

# Static files come from the apps' own folders, without collectstatic: fit for the
# demo and for tests. In production a front server has them, and this wrapper goes.
pages = ASGIStaticFilesHandler(get_asgi_application())

# Imports models, so only after the application above has set Django up.
from project.seismic.routing import websocket_urlpatterns  # noqa: E402

# A page of somebody else's site could open a socket here with the user's cookies: a
# browser says where the page is from, and only our own hosts may.
sockets = AllowedHostsOriginValidator(URLRouter(websocket_urlpatterns))

application = ProtocolTypeRouter({"http": pages, "websocket": sockets})
