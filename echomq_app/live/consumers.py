"""The websocket that pages connect to: many subscriptions on one socket.

    from echomq_app.routing import websocket_urlpatterns

Subclass it to decide who may read what, or what of a record they see:

    class Orders(EchoConsumer):
        async def may(self, identity, action, target):
            return target == f"orders.{identity.user.pk}"
"""

from __future__ import annotations

from typing import Any

from channels.generic.websocket import AsyncWebsocketConsumer

from ..core.frames import SUBPROTOCOL
from . import access
from .access import Identity
from .hub import Mask
from .limits import Limits
from .masks import mask_of
from .session import Session


class EchoConsumer(AsyncWebsocketConsumer):
    """Speaks the protocol of docs/protocol.md. `limits` is for subclasses to change."""

    channel_layer_alias = ""
    """None: what it sends comes through the hub and the feed, not to a channel of its own."""

    limits = Limits()

    async def may(self, identity: Identity, action: str, target: str) -> bool:
        """Decide whether this user may read; asked again at least every AUTHORIZE_INTERVAL.

        `action` is `stream.read` or `events.read`; see `ECHOMQ["AUTHORIZE"]`, which is asked by
        default.
        """
        return await access.allowed(identity, action, target)

    async def mask_for(self, identity: Identity, stream: str) -> Mask | None:
        """Return what this user sees of the stream's records; `None`: all of them, whole.

        Asked for each subscription, and again with `may`; see `ECHOMQ["MASK"]`, which is asked
        by default. A mask has a `key`: users with the same key see the same, and each record
        is masked and encoded once for them all.
        """
        return await mask_of(identity, stream)

    async def who(self) -> Identity:
        """Find out whose this socket is, from the session's cookie."""
        return await access.identify(self.scope)

    # Parts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run until the socket is gone, however it goes, and leave nothing behind."""
        self._session = Session(self)
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._session.stop()

    async def dispatch(self, message: Any) -> None:
        """Take a client's frame at once: Channels' own dispatch visits a database thread first."""
        if message["type"] == "websocket.receive":
            text = message.get("text")
            self._session.handle(message.get("bytes") or b"" if text is None else text)
        else:
            await super().dispatch(message)

    async def connect(self) -> None:
        offered = self.scope.get("subprotocols", ())
        await self.accept(SUBPROTOCOL if SUBPROTOCOL in offered else None)
        self._session.start()

    async def send_text(self, text: str) -> None:
        """Send one message; the session's writer alone calls this."""
        await self.send(text_data=text)

    async def close_with(self, code: int) -> None:
        """Close the socket; the session's writer alone calls this."""
        await self.close(code=code)
