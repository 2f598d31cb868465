"""Where a page begins that is rendered now."""

from __future__ import annotations

from ..exceptions import UnknownStream
from ..models import appending
from ..stream import Stream


def resume_token(name: str, *, using: str | None = None) -> str:
    """Return the token of a stream's head: all that is appended from now on follows it.

    Take it before you read what the page shows: what is appended in between then comes twice,
    not never. Creates the stream if there is none, so that there is a place to go on from.
    """
    stream = Stream(name, using=using)
    try:
        return stream.info().token
    except UnknownStream:
        appending.ensure(stream.using, name)
        return stream.info().token
