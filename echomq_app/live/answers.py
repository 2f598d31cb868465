"""What plain requests may ask, and are told, in the words of the websocket's frames."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
from django.http import QueryDict

from ..core import frames
from ..core.names import check_stream_name
from ..core.records import check_filter
from ..exceptions import InvalidName, InvalidPayload
from . import access
from .access import Identity

JSON = "application/json"
UNAVAILABLE = "The server can't tell right now. Try again in a few seconds."


class Refused(Exception):
    """A request that gets an answer other than records. `body` is JSON."""

    def __init__(
        self, status: int, body: bytes, *, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body
        self.headers = dict(headers or {})


def refused(status: int, code: str, message: str, **headers: str) -> Refused:
    """Make a refusal of an `error` frame. A header's name is written with `_` for `-`."""
    return Refused(
        status,
        error_body(code, message),
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


def bad_token(error: Exception) -> Refused:
    """Refuse a token: the client may come back with another one."""
    return refused(401, "bad_token", str(error), WWW_Authenticate='Bearer error="invalid_token"')


def unavailable(error: Exception) -> Refused:
    """Refuse for now what can't be answered now; log why, unless `Undecided` has been."""
    if not isinstance(error, access.Undecided):
        access.complain("read_failed", error)
    return refused(503, "failed", UNAVAILABLE, Retry_After="5")


def forbidden(identity: Identity, name: str) -> Refused:
    """Refuse somebody who may not read this stream."""
    return refused(403, *denial(identity, name))


def denial(identity: Identity, name: str) -> tuple[str, str]:
    """Return the code and message for somebody who may not (any longer) read this stream."""
    if not identity.authenticated:
        return "unauthenticated", (
            f"You may not read {name!r} without a login. Log in, or send a token in the header "
            "Authorization: Bearer."
        )
    return "denied", f"You may not read {name!r}."


def error_body(code: str, message: str) -> bytes:
    """Return an `error` frame that is of no subscription."""
    return msgspec.json.encode(frames.Error(code=code, message=message))


def expired_body(
    *,
    reason: str,
    requested: int | None,
    first: int,
    head: int,
    epoch: str,
    resume: str,
) -> bytes:
    """Return a `cursor_expired` frame that is of no subscription; it goes on at the head."""
    return msgspec.json.encode(
        {
            "type": "cursor_expired",
            "reason": reason,
            "requested": requested,
            "first": first,
            "head": head,
            "epoch": epoch,
            "cursor": head,
            "resume": resume,
        }
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which records a request wants. `place` is a token, a cursor, a word, or `None`."""

    place: int | str | None
    types: list[str] | None
    key: str | None
    limit: int


LIMIT, LIMIT_MAX = 100, 1_000
TYPES_MAX = 100


def wanted(name: str, query: QueryDict, places: tuple[str, ...], others: tuple[str, ...]) -> Wanted:
    """Read the query of a request for stream `name`; raise `Refused` for one that is wrong.

    `places` are the parameters that may name a place, of which one is given at most.
    """
    known = (*places, "types", "key", *others)
    for parameter in query:
        if parameter not in known:
            raise refused(
                400,
                "bad_request",
                f"There is no parameter {parameter[:40]!r}; there are {', '.join(known)}. "
                "A login token never goes in a URL, which servers log, but in the header "
                "Authorization: Bearer.",
            )
    values = {parameter: str(query[parameter]) for parameter in query}
    given = [parameter for parameter in places if parameter in query]
    if len(given) > 1:
        raise refused(400, "bad_request", f"Give {' or '.join(given)}, not both.")
    types = query.getlist("types") if "types" in query else None
    key = values.get("key")
    try:
        check_stream_name(name)
    except InvalidName as error:
        raise refused(404, "bad_name", str(error)) from None
    try:
        check_filter(types, key)
    except (InvalidName, InvalidPayload) as error:
        raise refused(400, "bad_request", str(error)) from None
    if types and len(types) > TYPES_MAX:
        raise refused(400, "bad_request", f"types may be given {TYPES_MAX} times.")
    place = values[given[0]] if given else None
    return Wanted(
        place=_number(place) if given and given[0] != "resume" else place,
        types=types,
        key=key,
        limit=_limit(values.get("limit", str(LIMIT))),
    )


def _number(text: str | None) -> int | str | None:
    """Return a cursor as a number, anything else as it is."""
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 19 else text


def _limit(text: str) -> int:
    limit = _number(text)
    if not isinstance(limit, int) or not 1 <= limit <= LIMIT_MAX:
        raise refused(400, "bad_request", f"limit is a number from 1 to {LIMIT_MAX:,}.")
    return limit
