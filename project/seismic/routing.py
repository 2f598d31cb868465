"""The page's websocket."""

from __future__ import annotations

from typing import Any

from django.urls import path

from .consumers import SeismicConsumer

SOCKET = "ws/seismic/"

websocket_urlpatterns: list[Any] = [
    path(SOCKET, SeismicConsumer.as_asgi()),  # type: ignore[arg-type]  # Channels reads it
]
