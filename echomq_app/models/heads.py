"""Where streams stand: one statement for many, and no error for those that don't exist."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from django.db import connections

from ..core.ids import EventId


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Where a stream stood in one snapshot. `epoch` is empty when there is no such stream."""

    epoch: str = ""
    first_position: int = 0
    write_cursor: int = 0
    tail: str = ""
    """Of the newest record; empty when none is retained."""
    pending: bool = False
    """Rows of this stream wait in the outbox. Only looked for if asked."""


# The newest record is looked up at or above first_position only: see `paging`.
_NEWEST = """
    FROM echomq_record r WHERE r.stream_id = s.id AND r.position >= s.first_position
    ORDER BY r.position DESC LIMIT 1"""
_POSTGRESQL = f"""
    SELECT n.name, s.epoch, s.first_position, w.position, w.id, {{pending}}
    FROM unnest(%s::text[]) AS n(name)
    LEFT JOIN echomq_stream s ON s.name = n.name
    LEFT JOIN LATERAL (SELECT r.position, r.id {_NEWEST}) AS w ON true"""
_SQLITE = f"""
    SELECT s.name, s.epoch, s.first_position, w.position, w.id, 0
    FROM echomq_stream s
    LEFT JOIN echomq_record w ON w.stream_id = s.id AND w.position = (SELECT r.position {_NEWEST})
    WHERE s.name IN ({{names}})"""
# As in `paging`: a range of one name.
_PENDING = "EXISTS (SELECT FROM echomq_outbox o WHERE o.stream >= n.name AND o.stream <= n.name)"


def read_heads(using: str, names: Sequence[str], *, with_pending: bool = False) -> dict[str, Head]:
    """Return where each of these streams stands. Costs two look-ups into an index for each."""
    connection = connections[using]
    heads = dict.fromkeys(names, Head())
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            pending = _PENDING if with_pending else "false"
            cursor.execute(_POSTGRESQL.format(pending=pending), (list(names),))
        else:
            cursor.execute(_SQLITE.format(names=", ".join(["%s"] * len(names))), tuple(names))
        for name, epoch, first, position, id, pending in cursor.fetchall():
            heads[name] = (
                Head(pending=pending)
                if epoch is None
                else Head(
                    epoch=epoch,
                    first_position=first,
                    write_cursor=first if position is None else position + 1,
                    tail=_tail(id),
                    pending=bool(pending),
                )
            )
    return heads


def _tail(id: Any) -> str:
    if id is None:
        return ""
    return EventId.from_uuid(id if isinstance(id, uuid.UUID) else uuid.UUID(id)).tail
