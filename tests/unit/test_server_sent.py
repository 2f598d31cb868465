"""Events on the wire, byte by byte."""

from __future__ import annotations

import pytest

from echomq_app.core.server_sent import COMMENT, event


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (event(b'{"a":1}'), b'data: {"a":1}\n\n'),
        (event(b"1", id="e:1:ff", name="ended"), b"id: e:1:ff\nevent: ended\ndata: 1\n\n"),
        (event(b"1", retry=3000), b"retry: 3000\ndata: 1\n\n"),
        (event(id="e:1:ff"), b"id: e:1:ff\n\n"),
        # JSON that SQL has written with line ends: each line is a field, or it would end there.
        (event(b'{\n"a":\r\n1}\r'), b'data: {\ndata: "a":\ndata: 1}\ndata: \n\n'),
        (event("é\u2028".encode()), "data: é\u2028\n\n".encode()),
    ],
)
def test_event(made: bytes, expected: bytes) -> None:
    assert made == expected


def test_comment_is_a_line_and_no_field() -> None:
    assert COMMENT == b":\n\n"
