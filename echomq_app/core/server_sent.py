"""Server-sent events as bytes (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import re

COMMENT = b":\n\n"
"""Says nothing, and keeps a connection from looking dead."""

_LINE_END = re.compile(rb"\r\n|\r|\n")


def event(data: bytes = b"", *, id: str = "", name: str = "", retry: int | None = None) -> bytes:
    """Return one event.

    `id` is what the client sends back as `Last-Event-ID`; without data it takes note of the
    id, and nobody else hears of it. `name` is the event's type (`message` if empty), `retry`
    the milliseconds until it connects again.
    """
    lines = []
    if retry is not None:
        lines.append(b"retry: %d" % retry)
    if id:
        lines.append(b"id: " + id.encode())
    if name:
        lines.append(b"event: " + name.encode())
    if data:
        # A line end would end the field. JSON has them between values only, where SQL wrote it.
        lines += [b"data: " + line for line in _LINE_END.split(data)]
    return b"\n".join(lines) + b"\n\n"
