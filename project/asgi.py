"""The project under an ASGI server: `uvicorn project.asgi:application`."""

from __future__ import annotations

import os

from channels.routing import ProtocolTypeRouter
from django.contrib.staticfiles.handlers import ASGIStaticFilesHandler
from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")

# Static files come from the apps' own folders, without collectstatic: fit for the
# demo and for tests. In production a front server has them, and this wrapper goes.
pages = ASGIStaticFilesHandler(get_asgi_application())

application = ProtocolTypeRouter({"http": pages})
