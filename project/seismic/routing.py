"""The page's websocket."""

from __future__ import annotations

from typing import Any

from channels.security.websocket import AllowedHostsOriginValidator
from django.urls import path

from .consumers import SeismicConsumer

SOCKET = "ws/seismic/"

# A page of somebody else's site could open a socket here with the user's cookies: a
# browser says where the page is from, and only our own hosts may.
websocket_urlpatterns: list[Any] = [
    path(SOCKET, AllowedHostsOriginValidator(SeismicConsumer.as_asgi())),
]
