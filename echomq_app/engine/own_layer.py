"""An instance of the project's channel layer that nobody but the engine uses.

Two event loops that receive on one channels-redis instance are an error there, and its
receive lock is shared by all readers; so the engine never touches what
`get_channel_layer()` returns. An instance of our own can also be made to fit:

- channels-redis doesn't tell when its link to Redis broke and came back (redis-py
  reconnects by itself), though messages were lost meanwhile, and after a restart of
  Redis the core layer stays deaf for ever. redis-py calls `redis_connect_func` for
  every connection that it makes, so that is where we listen: a connection object that
  connects again had been broken.
- redis-py 8 gives up on a socket that was silent for 5 seconds. An idle link is silent.
- redis-py sends a failed command again. For a message that is at most once, the answer
  to a failure is to report it; the engine has its own backoff.

Any other layer is taken as it is, and watched by probes alone (see `resubscribe.py`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from channels.layers import channel_layers
from django.utils.module_loading import import_string

logger = logging.getLogger("echomq")

_CORE = "channels_redis.core.RedisChannelLayer"
_PUBSUB = "channels_redis.pubsub.RedisPubSubChannelLayer"
_RECONNECT_BASE = 0.02
_RECONNECT_CAP = 0.5


class OwnLayer:
    """A fresh instance for the running loop. Close it there."""

    def __init__(
        self,
        layer: str | Mapping[str, Any],
        on_reconnect: Callable[[], object] | None = None,
    ) -> None:
        """Make it from an alias of CHANNEL_LAYERS, or from an entry like those there.

        With `on_reconnect`, for receiving, and called when the link came back.
        """
        self.broken = ""  # why, once the link can't be trusted any more
        self._on_reconnect = on_reconnect
        self._sharded = False
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        settings = channel_layers.configs[layer] if isinstance(layer, str) else layer
        self._backend = import_string(settings["BACKEND"])
        self._family = _family(self._backend)
        self.receiver: asyncio.Task[None] | None = None
        self.prober: asyncio.Task[Any] | None = None
        self.layer: Any = self._make(dict(settings.get("CONFIG") or {}))

    @property
    def is_core(self) -> bool:
        """Whether it is channels-redis's layer of lists, not of pub/sub."""
        return self._family == _CORE

    @property
    def leaves_by_closing(self) -> bool:
        """Whether the end of the connection ends the membership in all groups."""
        return self._family == _PUBSUB

    def link_is_new(self) -> None:
        """Take the next connection of each kind as a first one (after an idle timeout)."""
        self._seen.clear()

    async def close(self, timeout: float) -> None:
        """End the receive task and close the connections; give up after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._close()
        except Exception as error:  # noqa: BLE001  (the instance is dropped either way)
            logger.debug("event=layer_close_failed error=%r", error)
        finally:
            if self._family:
                # channels-redis hangs a hook on the loop's close() for every instance
                # and never takes it off. This instance is closed already.
                vars(asyncio.get_running_loop()).pop("close", None)

    async def _close(self) -> None:
        if self._family == _PUBSUB:
            # First, so that the cancelled receive() finds nothing to unsubscribe from a
            # link that may be dead. (Here flush() only closes; on core it deletes keys.)
            await self.layer.flush()
        if self.receiver is not None:
            self.receiver.cancel()
            await asyncio.gather(self.receiver, return_exceptions=True)
        if self._family == _CORE:
            await self.layer.close_pools()
        elif not self._family and callable(close := getattr(self.layer, "close", None)):
            await close()

    def _make(self, config: dict[str, Any]) -> Any:
        if not self._family:
            return self._backend(**config)
        from channels_redis.utils import decode_hosts

        hosts = decode_hosts(config.get("hosts"))
        self._sharded = len(hosts) > 1
        config["hosts"] = [self._fit(host) for host in hosts]
        return self._backend(**config)

    def _fit(self, host: dict[str, Any]) -> dict[str, Any]:
        from redis.asyncio.retry import Retry
        from redis.backoff import FullJitterBackoff, NoBackoff

        fitted = {**host, **_no_maintenance()}
        fitted |= {"socket_timeout": None, "retry": Retry(NoBackoff(), 0)}
        if self._on_reconnect is not None:
            if self._family == _PUBSUB:
                # Its receive task would pause for a second and log a traceback for each
                # failure; let redis-py itself try until the link is back.
                backoff = FullJitterBackoff(cap=_RECONNECT_CAP, base=_RECONNECT_BASE)
                fitted["retry"] = Retry(backoff, -1)
            fitted["redis_connect_func"] = self._watch(host.get("redis_connect_func"))
        return fitted

    def _watch(self, theirs: Callable[[Any], Any] | None) -> Callable[[Any], Awaitable[None]]:
        async def connected(connection: Any) -> None:
            if theirs is None:
                await connection.on_connect()
            elif asyncio.iscoroutinefunction(theirs):
                await theirs(connection)
            else:
                theirs(connection)
            again = connection in self._seen
            self._seen.add(connection)
            if again and self._carries_messages() and self._on_reconnect is not None:
                self.broken = "the layer had to connect again"
                self._on_reconnect()

        return connected

    def _carries_messages(self) -> bool:
        """Tell whether the connection being made is the one that messages come through.

        The others may have been closed for idleness, which loses nothing. On core that
        is the one of the receive task; but with several hosts the groups may live on
        another one, which we only meet when we join again.
        """
        task = asyncio.current_task()
        if self._family == _CORE and not self._sharded:
            return task is self.receiver
        return task is not self.prober


def _no_maintenance() -> dict[str, Any]:
    """Return the option that turns redis-py 8's maintenance notices off, where there is one.

    With them, its pool hands out connections that the server closed long ago, and leaves
    it to a retry to find out.
    """
    from redis.asyncio.connection import ConnectionPool

    name = "maint_notifications_config"
    if name not in inspect.signature(ConnectionPool).parameters:
        return {}
    from redis.maint_notifications import MaintNotificationsConfig

    return {name: MaintNotificationsConfig(enabled=False)}


def _family(backend: type) -> str:
    names = {f"{base.__module__}.{base.__qualname__}" for base in backend.__mro__}
    return next((name for name in (_CORE, _PUBSUB) if name in names), "")


def is_idle_timeout(error: BaseException) -> bool:
    """Tell whether a receive only says that nothing came (redis-py has its own class)."""
    return type(error).__name__ == "TimeoutError"
