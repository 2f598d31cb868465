"""The page's websocket."""

from __future__ import annotations

from django.urls import path

from .consumers import SeismicConsumer

SOCKET = "ws/seismic/"

websocket_urlpatterns = [
    path(SOCKET, SeismicConsumer.as_asgi()),  # type: ignore[arg-type]  # Channels reads it
]
