"""Resume tokens, and the decision whether a reader's cursor is still a place.

A cursor is the next position that a reader still needs. A token is a cursor that can
be checked: `<epoch>:<cursor>:<tail>`, where `tail` is the random 32 bits of the
record before the cursor (empty at 0, or when that record is unknown). Same epoch, same
cursor, another tail: the record before was replaced, so history has diverged, as after
an asynchronous failover or a restored backup.
"""

from __future__ import annotations

import re

import msgspec

from ..exceptions import CursorExpired, CursorInvalid

NO_EPOCH = "0" * 16
"""In the token of a stream that didn't exist yet: all its records follow, whoever creates it."""

_TOKEN = re.compile(r"([0-9a-f]{16}):(0|[1-9][0-9]{0,12}):([0-9a-f]{8})?\Z")


class ResumeToken(msgspec.Struct, frozen=True):
    """A token, taken apart. `tail` is `""` where there is nothing to compare."""

    epoch: str
    cursor: int
    tail: str = ""

    def __str__(self) -> str:
        return f"{self.epoch}:{self.cursor}:{self.tail}"

    @property
    def precedes_stream(self) -> bool:
        """Whether the stream didn't exist when this token was made."""
        return self.epoch == NO_EPOCH and self.cursor == 0


TOKEN_BEFORE_STREAM = ResumeToken(NO_EPOCH, 0)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream held in one snapshot, and what stood before the reader's cursor."""

    stream: str
    epoch: str
    first_position: int
    write_cursor: int
    tail_before: str = ""
    """Tail of the record at cursor - 1, `""` when it isn't there."""


def parse(text: str) -> ResumeToken | None:
    """Take a token apart; `None` when it is none."""
    match = _TOKEN.match(text)
    if match is None:
        return None
    return ResumeToken(match[1], int(match[2]), match[3] or "")


def requested_cursor(cursor: object) -> tuple[int | None, ResumeToken | None, bool]:
    """Return (cursor, token, well_formed) of what a caller passed as a cursor."""
    if cursor is None:
        return None, None, True
    if isinstance(cursor, str):
        token = parse(cursor)
        return (token.cursor, token, True) if token else (None, None, False)
    if isinstance(cursor, int) and not isinstance(cursor, bool) and cursor >= 0:
        return cursor, None, True
    return None, None, False


def verify(
    place: Place, requested: int | str | None, *, may_be_ahead: bool = False
) -> CursorExpired | CursorInvalid | None:
    """Decide whether a reader may go on from `requested`; return the error, or `None`.

    Another epoch is decided first (its numbers mean nothing here), then above the write
    cursor, then expired, then diverged: a position that was trimmed can't be compared.
    `may_be_ahead` is for an explicit read from a replica, which is only behind.
    """
    cursor, token, well_formed = requested_cursor(requested)
    if not well_formed:
        return _invalid(place, "malformed", requested)
    if token is not None and token.epoch != place.epoch and not token.precedes_stream:
        return _invalid(place, "epoch", requested)
    if cursor is None:
        return None
    if cursor > place.write_cursor:
        return None if may_be_ahead else _invalid(place, "ahead", requested)
    if cursor < place.first_position:
        return CursorExpired(
            stream=place.stream,
            requested=cursor,
            first_position=place.first_position,
            write_cursor=place.write_cursor,
            epoch=place.epoch,
        )
    if token is not None and token.tail and place.tail_before not in ("", token.tail):
        return _invalid(place, "diverged", requested)
    return None


def _invalid(place: Place, reason: str, requested: object) -> CursorInvalid:
    return CursorInvalid(
        stream=place.stream,
        reason=reason,
        requested=requested,
        first_position=place.first_position,
        write_cursor=place.write_cursor,
        epoch=place.epoch,
    )
