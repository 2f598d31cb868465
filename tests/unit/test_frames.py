"""The websocket protocol's frames: what is taken, what is refused, what its documents say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echomq_app.core import asyncapi, frames
from echomq_app.core.frames import BadFrame, decode, encode

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        ('{"type": "ping"}', frames.Ping()),
        ('{"type": "auth", "token": "t"}', frames.Auth("t")),
        ('{"type": "ack", "sub": 1, "cursor": 3}', frames.Ack(1, 3)),
        ('{"type": "unsubscribe", "sub": 0}', frames.Unsubscribe(0)),
        ('{"type": "subscribe", "sub": 2, "events": "e"}', frames.Subscribe(sub=2, events="e")),
        (
            '{"type": "subscribe", "sub": 2, "stream": "s", "from": "head", "types": ["a"]}',
            frames.Subscribe(sub=2, stream="s", start="head", types=["a"]),
        ),
        (
            '{"type": "subscribe", "sub": 2, "stream": "s", "resume": "", "key": ""}',
            frames.Subscribe(sub=2, stream="s", resume="", key=""),
        ),
    ],
)
def test_what_a_client_may_send(text: str, frame: frames.ClientFrame) -> None:
    assert decode(text) == [frame]
    assert decode(f"[{text}, {text}]".encode()) == [frame, frame]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("\ud800", "no JSON"),
        ("[" * 100_000, "no frame"),
        ('"x"', "no frame"),
        ("null", "no frame"),
        ("{}", "`type`"),
        ('{"type": "records"}', "'records'"),
        ('{"type": "ping", "more": 1}', "`more`"),
        ('{"type": "ack", "sub": 1}', "`cursor`"),
        ('{"type": "ack", "sub": -1, "cursor": 1}', r"\$.sub"),
        ('{"type": "ack", "sub": 1, "cursor": 1.5}', r"\$.cursor"),
        ('{"type": "ack", "sub": true, "cursor": 1}', r"\$.sub"),
        ('{"type": "ack", "sub": 1, "cursor": 9007199254740992}', r"\$.cursor"),
        ('{"type": "subscribe", "sub": 1}', "a stream or events"),
        ('{"type": "subscribe", "sub": 1, "stream": "s", "events": "e"}', "a stream or events"),
        ('{"type": "subscribe", "sub": 1, "events": "e", "from": 0}', "not kept"),
        ('{"type": "subscribe", "sub": 1, "stream": "s", "from": 0, "resume": "t"}', "not both"),
        ('{"type": "subscribe", "sub": 1, "stream": "s", "from": "tail"}', r"\$.from"),
        ('{"type": "subscribe", "sub": 1, "stream": "s", "from": -1}', r"\$.from"),
    ],
)
def test_what_is_refused_says_what_is_wrong(text: str, said: str) -> None:
    with pytest.raises(BadFrame, match=said):
        decode(text)


@given(st.text() | st.binary() | st.recursive(st.none() | st.text(), st.lists).map(json.dumps))
def test_anything_else_is_a_bad_frame_and_no_other_error(text: str | bytes) -> None:
    try:
        frames_that_came = decode(text)
    except BadFrame:
        return
    assert isinstance(frames_that_came, list)


def test_records_pass_through_as_they_are() -> None:
    text = b'{"n":1e400,"big":123456789012345678901234567890,"e":"\xc3\xa9"}'
    raw = msgspec.Raw(text)
    frame = frames.Records(sub=1, since=0, records=[raw], cursor=1, resume="r", head=1)
    assert text.decode() in encode(frame)


def test_what_is_not_known_stands_there_as_null_or_not_at_all() -> None:
    assert encode(frames.Subscribed(sub=1)) == '{"type":"subscribed","sub":1}'
    assert (
        encode(frames.Error(code="c", message="m")) == '{"type":"error","code":"c","message":"m"}'
    )
    expired = frames.CursorExpired(
        sub=1, reason="malformed", requested=None, first=0, head=0, epoch="e", cursor=0, resume="r"
    )
    assert json.loads(encode(expired))["requested"] is None


class TestDocuments:
    def test_asyncapi_is_that_of_the_structs(self) -> None:
        stored = json.loads((DOCS / "asyncapi.json").read_text("utf-8"))
        assert stored == asyncapi.document(), "python -m echomq_app.core.asyncapi > docs/…"

    def test_every_reference_leads_somewhere(self) -> None:
        document = asyncapi.document()

        def follow(value: Any) -> None:
            for item in value.values() if isinstance(value, dict) else value:
                if isinstance(item, dict | list):
                    follow(item)
            if isinstance(value, dict) and "$ref" in value:
                place: Any = document
                for step in value["$ref"].removeprefix("#/").split("/"):
                    place = place[step]

        follow(document)

    def test_protocol_md_has_every_frame_code_and_reason(self) -> None:
        text = (DOCS / "protocol.md").read_text("utf-8")
        for kind in (*get_args(frames.ClientFrame), *get_args(frames.ServerFrame)):
            tag = kind.__struct_config__.tag
            assert f'"type": "{tag}"' in text, tag
            for field in kind.__struct_encode_fields__:
                assert f'"{field}"' in text, (tag, field)
        codes = [getattr(frames.Close, name) for name in vars(frames.Close) if name.isupper()]
        for code in codes:
            assert isinstance(code, frozenset) or str(code) in text
        source = Path(frames.__file__).parents[1] / "live" / "session.py"
        for code in set(
            re.findall(
                r'"(bad_\w+|denied|un\w+|sub_in_use|too_many|rate|failed)"', source.read_text()
            )
        ):
            assert f"`{code}`" in text, code

    def test_a_client_that_reads_only_protocol_md_can_decode_its_examples(self) -> None:
        text = (DOCS / "protocol.md").read_text("utf-8")
        decoded = set()
        for example in re.findall(r"\| `(\{.*?\})` \|", text):
            if "…" not in example and any(
                f'"type": "{kind.__struct_config__.tag}"' in example
                for kind in get_args(frames.ClientFrame)
            ):
                decoded |= {type(frame) for frame in decode(example)}
        assert decoded >= {frames.Subscribe, frames.Ack, frames.Ping}  # of auth it shows no token
