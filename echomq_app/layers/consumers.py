"""What Channels' consumers do with a notice, unless they say otherwise.

Channels raises an exception for a message that a consumer has no handler for. So every
consumer gets one: a websocket is closed with code 4410 and its client connects again and
loads afresh; all others log it. `CursorExpiredMixin` is for those who know better.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from channels.consumer import AsyncConsumer, SyncConsumer
from channels.generic.websocket import AsyncWebsocketConsumer, WebsocketConsumer

logger = logging.getLogger("echomq")

CLOSE_CODE = 4410
CLOSE_WITHIN = 2.0
"""Seconds over which closings are spread, so that not all clients come back at once."""


class CursorExpiredMixin:
    """Put it before the consumer's class, and say what to do in `cursor_expired`.

    It is called before the first message after the hole. In an async consumer it is a
    coroutine function, in a sync one a plain function.
    """

    def cursor_expired(self, node: str, missed: int) -> Any:
        """Reload from the source of truth. `missed` is 0 when nobody knows how many."""
        raise NotImplementedError(f"{type(self).__name__} has to define cursor_expired().")

    def echo_cursor_expired(self, message: dict[str, Any]) -> Any:
        """Take the notice; Channels calls this for its type."""
        return self.cursor_expired(message["node"], message["missed"])


async def _log(self: AsyncConsumer, message: dict[str, Any]) -> None:
    _say(self, message)


def _log_sync(self: SyncConsumer, message: dict[str, Any]) -> None:
    _say(self, message)


async def _close(self: AsyncWebsocketConsumer, message: dict[str, Any]) -> None:
    _say(self, message)
    # Waiting here holds back what comes after the hole.
    await asyncio.sleep(random.uniform(0, CLOSE_WITHIN))  # noqa: S311
    await self.close(code=CLOSE_CODE)


def _close_sync(self: WebsocketConsumer, message: dict[str, Any]) -> None:
    # At once: a wait would hold up all other sync code of the process.
    _say(self, message)
    self.close(code=CLOSE_CODE)


def _say(consumer: object, message: dict[str, Any]) -> None:
    logger.warning(
        "event=consumer_cursor_expired consumer=%s node=%s missed=%s",
        type(consumer).__name__,
        message.get("node"),
        message.get("missed"),
    )


def install_default_handlers() -> None:
    """Give Channels' consumers a handler for notices. Once, when Django is ready."""
    handlers: dict[type, Any] = {
        AsyncConsumer: _log,
        SyncConsumer: _log_sync,
        AsyncWebsocketConsumer: _close,
        WebsocketConsumer: _close_sync,
    }
    for consumer, handler in handlers.items():
        if "echo_cursor_expired" not in vars(consumer):
            consumer.echo_cursor_expired = handler  # type: ignore[attr-defined]
