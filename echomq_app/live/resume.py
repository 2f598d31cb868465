"""Where a page begins that is rendered now."""

from __future__ import annotations

from ..core.tokens import TOKEN_BEFORE_STREAM
from ..exceptions import UnknownStream
from ..stream import Stream


def resume_token(name: str, *, using: str | None = None) -> str:
    """Return the token of a stream's head: all that is appended from now on follows it.

    Take it before you read what the page shows: what is appended in between then comes twice,
    not never. Before the stream exists the token stands for its beginning, whoever creates it.
    """
    try:
        return Stream(name, using=using).info().token
    except UnknownStream:
        return str(TOKEN_BEFORE_STREAM)
