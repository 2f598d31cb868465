"""A page of records as JSON, from the database as it is stored there."""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from ..conf import current
from ..core.records import token_of
from ..core.tokens import requested_cursor, verify
from ..models import paging
from ..stream import Stream
from .answers import Wanted, expired_body
from .items import Item, Mask


class _RecordPage(Struct, tag="records", tag_field="type", kw_only=True):
    """The `records` frame, and what else a reader by request has to know."""

    since: int
    records: list[Raw]
    cursor: int
    resume: str
    first: int
    head: int
    epoch: str


def record_page(name: str, question: Wanted, mask: Mask | None) -> bytes:
    """Return the page as JSON, as the mask shows it.

    Raises `UnknownStream`, `CursorExpired` or `CursorInvalid`.
    """
    start, token, _ = requested_cursor(question.place)
    snapshot = paging.read_stored_page(
        Stream(name).using,
        name,
        start,
        Item,
        limit=question.limit,
        types=question.types,
        key=question.key,
        window=max(current().FILTER_WINDOW, question.limit),
    )
    place = snapshot.place
    error = verify(place, question.place)
    if error is not None:
        raise error
    tail = snapshot.end_tail
    if token is not None and token.cursor == snapshot.end_cursor:
        tail = tail or token.tail
    return msgspec.json.encode(
        _RecordPage(
            since=place.first_position if start is None else start,
            records=[
                raw
                for item in snapshot.records
                if (raw := item.shown(mask, name, place.epoch)) is not None
            ],
            cursor=snapshot.end_cursor,
            resume=token_of(place.epoch, snapshot.end_cursor, tail),
            first=place.first_position,
            head=place.write_cursor,
            epoch=place.epoch,
        )
    )


def expired(name: str, reason: str, asked: object) -> bytes:
    """Return the `cursor_expired` frame for a place that is none, with what there is now."""
    info = Stream(name).info()
    return expired_body(
        reason=reason,
        requested=requested_cursor(asked)[0],
        first=info.first_position,
        head=info.write_cursor,
        epoch=info.epoch,
        resume=info.token,
    )
