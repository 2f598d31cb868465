"""What the layer says about itself: signals, and one log line for each kind of event."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from .. import signals
from ..core.echo.effects import Effect, SendBatch
from ..core.echo.receiver import Notice
from .options import LayerOptions

logger = logging.getLogger("echomq")

_SIGNALS = {
    "buffer_expired": signals.buffer_expired,
    "batch_acked": signals.batch_acked,
    "sync_failure": signals.sync_failure,
    "retry_scheduled": signals.retry_scheduled,
    "node_joined": signals.node_joined,
    "node_forgotten": signals.node_forgotten,
}
_LOUD = {
    "buffer_expired": logging.WARNING,
    "sync_failure": logging.WARNING,
    "node_forgotten": logging.INFO,
    "node_joined": logging.INFO,
}


class Reports:
    """Sends the signals of one station. On the engine's thread only."""

    def __init__(self, options: LayerOptions, name: str) -> None:
        self._options = options
        self._name = name
        self._warned_at = float("-inf")

    def flushed(self, count: int, fill: float, effects: Iterable[Effect]) -> None:
        """`count` new messages were let go."""
        nodes = sum(isinstance(effect, SendBatch) for effect in effects)
        signals.buffer_flush.send_robust(sender=Reports, count=count, nodes=nodes, fill=fill)

    def delivered(self, count: int) -> None:
        """`count` messages of another node reached the channels here."""
        signals.batch_delivered.send_robust(sender=Reports, count=count)

    def notice(self, notice: Notice, channels: int) -> None:
        """So many channels here were told that they missed something."""
        if not channels:  # A process that has just started has nobody to tell.
            return
        logger.warning(
            "event=cursor_expired node=%s missed=%d channels=%d",
            notice.node,
            notice.missed,
            channels,
        )
        signals.cursor_expired.send_robust(
            sender=Reports, node=notice.node, missed=notice.missed, channels=channels
        )

    def fill(self, fill: float, now: float) -> None:
        """The fullest buffer is so full, 0 to 1, of what somebody still needs."""
        options = self._options
        if fill < options.capacity_warning_threshold or fill == 0:
            return
        if now - self._warned_at < options.capacity_warning_interval:
            return
        self._warned_at = now
        size = options.buffer_size
        logger.warning("event=buffer_capacity fill=%.2f buffer_size=%d", fill, size)
        signals.buffer_capacity_warning.send_robust(
            sender=Reports, fill=fill, used=round(fill * size), buffer_size=size
        )

    def happened(self, what: str, details: Mapping[str, Any]) -> None:
        """Something that the protocol reports."""
        if what == "name_shared":
            logger.warning(
                "event=node_name_shared node=%s: two live processes have this name. Leave out "
                '"node", or give each process its own.',
                details["node"],
            )
        elif what == "clock_skew":
            logger.warning(
                "event=clock_skew node=%s seconds=%s: set the clocks right; channels-redis's "
                "core layer deletes messages by their sender's clock.",
                details["node"],
                details["seconds"],
            )
        elif what == "batch_acked":  # too many to log
            _SIGNALS[what].send_robust(sender=Reports, **details)
        else:
            words = " ".join(f"{key}={value}" for key, value in details.items())
            logger.log(_LOUD.get(what, logging.DEBUG), "event=%s %s", what, words)
            _SIGNALS[what].send_robust(sender=Reports, **details)
