"""What CONFIG of an EchoChannelLayer may hold, checked when the layer is made."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from channels.layers import InMemoryChannelLayer, channel_layers
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ..core.echo.peers import Rules

_NODE_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
_TRANSPORT = 'an alias in CHANNEL_LAYERS, a dict with "BACKEND" and "CONFIG", or None'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions:
    """CONFIG of an EchoChannelLayer with its defaults. Times are in seconds."""

    transport: object = None
    """The layer that carries frames between processes; None: this process only."""
    pool_size: int = 1
    """Independent producers; a sender key always uses the same one."""
    buffer_size: int = 10_000
    """Messages that each producer keeps for nodes that are behind."""
    batch_interval: float = 0.2
    """How long messages are gathered; the first after a pause goes at once. 0: no wait."""
    call_timeout: float = 5.0
    """How long the ack of a batch may take."""
    retry_interval: float = 0.2
    """The first pause after a failure; it doubles up to 5 s."""
    concurrent_flush: bool = True
    """Whether all nodes are sent to at the same time, or one after the other."""
    max_batch: int = 500
    """Messages in one frame."""
    capacity: int | None = None
    """Messages that wait in one channel; None: as many as buffer_size."""
    capacity_warning_threshold: float = 0.4
    """How full a buffer is, 0 to 1, when `buffer_capacity_warning` is sent."""
    capacity_warning_interval: float = 60.0
    """At most one such warning in this time."""
    heartbeat_interval: float = 5.0
    """How often a node says that it is there."""
    forget_after: float = 60.0
    """A node that is silent for so long is forgotten."""
    node: str | None = None
    """The name of this node; None: made of the host's name and the process id."""

    def __post_init__(self) -> None:
        for name in ("pool_size", "buffer_size", "max_batch", "capacity"):
            value = getattr(self, name)
            if value is None and name == "capacity":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _wrong(name, "a whole number of at least 1", value)
        for name in ("call_timeout", "retry_interval", "heartbeat_interval", "forget_after"):
            _check_number(name, getattr(self, name), above=0)
        for name in ("batch_interval", "capacity_warning_interval", "capacity_warning_threshold"):
            _check_number(name, getattr(self, name), above=-1e-9)
        if not isinstance(self.concurrent_flush, bool):
            raise _wrong("concurrent_flush", "True or False", self.concurrent_flush)
        if self.forget_after < 3 * self.heartbeat_interval:
            raise _wrong(
                "forget_after",
                f"at least three times heartbeat_interval ({self.heartbeat_interval:g})",
                self.forget_after,
            )
        if self.node is not None and not _NODE_NAME.match(str(self.node)):
            raise _wrong("node", "up to 100 letters, digits, '.', '_' and '-'", self.node)
        self._check_transport()

    def _check_transport(self) -> None:
        transport = self.transport
        if transport is None or isinstance(transport, str):
            return
        if not isinstance(transport, dict) or not isinstance(transport.get("BACKEND"), str):
            raise _wrong("transport", _TRANSPORT, transport)
        if transport["BACKEND"].endswith("EchoChannelLayer"):
            raise _wrong("transport", "another layer, not an EchoChannelLayer", transport)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LayerOptions:
        """Return the options; raise `ImproperlyConfigured` for a wrong or unknown one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in config:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
                raise ImproperlyConfigured(f"EchoChannelLayer has no option {name!r}. {hint}")
        return cls(**config)

    def rules(self) -> Rules:
        """Return what the protocol needs of it."""
        names = [field.name for field in dataclasses.fields(Rules)]
        return Rules(**{name: getattr(self, name) for name in names})

    def transport_settings(self) -> Mapping[str, Any] | None:
        """Return the transport's BACKEND and CONFIG."""
        if isinstance(self.transport, dict):
            return self.transport
        if not isinstance(self.transport, str):
            return None
        settings: Mapping[str, Any] | None = channel_layers.configs.get(self.transport)
        if settings is None:
            aliases = ", ".join(map(repr, channel_layers.configs))
            raise ImproperlyConfigured(
                f"EchoChannelLayer's transport is {self.transport!r}, and CHANNEL_LAYERS has no "
                f"such alias; it has {aliases}."
            )
        if str(settings.get("BACKEND", "")).endswith("EchoChannelLayer"):
            raise _wrong("transport", "another layer, not an EchoChannelLayer", self.transport)
        return settings

    def crosses_processes(self) -> bool:
        """Tell whether the transport, if there is one, reaches other processes."""
        transport = self.transport_settings()
        if transport is None:
            return False
        return not issubclass(import_string(transport["BACKEND"]), InMemoryChannelLayer)

    def key(self) -> str:
        """Return a text that is the same for the same options."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, default=repr)

    def node_name(self) -> str:
        """Return the name of this process's node."""
        if self.node is not None:
            return self.node
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:80]
        return f"{host}-{os.getpid()}"


def _check_number(name: str, value: object, *, above: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not value > above:  # type: ignore[operator]
        what = "a number above 0" if above == 0 else "a number of 0 or more"
        raise _wrong(name, what, value)


def _wrong(name: str, what: str, value: object) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"EchoChannelLayer's option {name!r} has to be {what}, not {value!r}."
    )
