"""What the protocol wants done. Whoever drives a node does it, in the order of the list."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .frames import Ack, Batch, Bye, Hello, Record
from .receiver import Notice


@dataclasses.dataclass(frozen=True, slots=True)
class Broadcast:
    """Send this to all nodes, ourselves included: hearing it shows that the link is good."""

    frame: Hello


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Send this to the `control` address of a node. If it fails, nothing is to be done."""

    address: str
    frame: Hello | Ack | Bye


@dataclasses.dataclass(frozen=True, slots=True)
class SendBatch:
    """Send this to the `data` address of node `boot`; if it fails, say so to the node."""

    boot: str
    address: str
    frame: Batch


@dataclasses.dataclass(frozen=True, slots=True)
class Deliver:
    """Hand these records to the subscribers here."""

    records: Sequence[Record]


@dataclasses.dataclass(frozen=True, slots=True)
class Notify:
    """Tell all subscribers here, before anything that is delivered later."""

    notice: Notice


@dataclasses.dataclass(frozen=True, slots=True)
class Happened:
    """Something to signal and to log: the signal's name and its arguments."""

    what: str
    details: Mapping[str, Any]


Effect = Broadcast | Send | SendBatch | Deliver | Notify | Happened
