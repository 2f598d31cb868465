"""The tables, and the statements that work on them."""

from .stream import Outbox, Record, Stream

__all__ = ["Outbox", "Record", "Stream"]
