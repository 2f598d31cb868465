"""The application that the benchmarks of live pages connect to.

`/ws/echomq/` is our consumer, open to everybody. `/ws/plain/` is what the Channels
documentation shows: a consumer in a group, and JSON.
"""

from __future__ import annotations

from typing import Any

import django

django.setup()

from channels.generic.websocket import AsyncJsonWebsocketConsumer  # noqa: E402
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from django.urls import path  # noqa: E402

from echomq_app.live.consumers import EchoConsumer  # noqa: E402

GROUP = "plain"


class OpenConsumer(EchoConsumer):
    """Lets everybody read."""

    async def may(self, identity: Any, action: str, target: str) -> bool:
        return True


class PlainConsumer(AsyncJsonWebsocketConsumer):
    """Passes on what the group gets."""

    channel_layer_alias = "plain"

    async def connect(self) -> None:
        await self.channel_layer.group_add(GROUP, self.channel_name)
        await self.accept()
        await self.send_json({"type": "subscribed"})

    async def disconnect(self, code: int) -> None:
        await self.channel_layer.group_discard(GROUP, self.channel_name)

    async def record(self, event: dict[str, Any]) -> None:
        await self.send_json(event["record"])


application = ProtocolTypeRouter(
    {
        "websocket": URLRouter(
            [
                path("ws/echomq/", OpenConsumer.as_asgi()),  # type: ignore[arg-type, list-item]
                path("ws/plain/", PlainConsumer.as_asgi()),  # type: ignore[arg-type, list-item]
            ]
        )
    }
)
