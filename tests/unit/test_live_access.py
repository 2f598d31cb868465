"""Origins, tokens and rules, without a database."""

from __future__ import annotations

from typing import Any

import pytest
from pytest_django.fixtures import Settings

from echomq_app.live import access


def scope(kind: str = "websocket", /, *, scheme: str = "", **headers: str) -> dict[str, Any]:
    """Return an ASGI scope; a header's name is written with `_` for `-`."""
    given = {"host": "shop.example", **headers}
    return {
        "type": kind,
        "scheme": scheme or {"websocket": "ws", "http": "http"}[kind],
        "path": "/ws/echomq/",
        "query_string": b"\xff",
        "headers": [
            (name.replace("_", "-").encode(), value.encode("latin1"))
            for name, value in given.items()
        ],
    }


@pytest.mark.parametrize(
    ("connection", "expected"),
    [
        (scope(origin="http://shop.example"), True),
        (scope(scheme="wss", origin="https://shop.example"), True),
        (scope(host="shop.example:8000", origin="http://shop.example:8000"), True),
        (scope("http", origin="http://shop.example"), True),
        (scope("http"), True),
        (scope("http", sec_fetch_site="same-origin"), True),
        (scope("http", sec_fetch_site="none"), True),
        (scope("http", sec_fetch_site="cross-site"), False),
        (scope("http", sec_fetch_site="same-site"), False),
        (scope(), False),  # no browser leaves it out
        (scope(origin=""), False),
        (scope(origin="null"), False),
        (scope(origin="https://shop.example"), False),  # another scheme
        (scope(scheme="wss", origin="http://shop.example"), False),
        (scope(origin="http://shop.example:8000"), False),
        (scope(origin="http://shop.example.evil.example"), False),
        (scope(origin="http://evil.example"), False),
        (scope("http", origin="http://evil.example"), False),
        (scope(origin="http://[broken"), False),
        (scope(host="not allowed", origin="http://not allowed"), False),
    ],
)
def test_origin_of_this_host_alone(connection: dict[str, Any], expected: bool) -> None:
    assert access.origin_allowed(connection) is expected


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("https://partner.example", True),
        ("http://partner.example", False),
        ("https://a.team.example", True),
        ("https://team.example", True),
        ("http://a.team.example", False),
        ("https://evilteam.example", False),
        ("https://a.team.example.evil.example", False),
        ("http://[broken", False),
    ],
)
def test_trusted_origins(settings: Settings, origin: str, expected: bool) -> None:
    settings.CSRF_TRUSTED_ORIGINS = ["https://partner.example", "https://*.team.example"]
    assert access.origin_allowed(scope(origin=origin)) is expected


def test_host_behind_a_proxy(settings: Settings) -> None:
    behind = scope(host="10.0.0.1", origin="http://shop.example", x_forwarded_host="shop.example")
    assert not access.origin_allowed(behind)
    settings.USE_X_FORWARDED_HOST = True
    assert access.origin_allowed(behind)
    settings.ALLOWED_HOSTS = ["other.example"]
    assert not access.origin_allowed(behind)


def test_scheme_behind_a_proxy(settings: Settings) -> None:
    behind = scope(origin="https://shop.example", x_forwarded_proto="https")
    assert not access.origin_allowed(behind)
    settings.SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    assert access.origin_allowed(behind)


async def test_without_a_cookie_it_is_nobody() -> None:
    nobody = await access.identify(scope(origin="http://shop.example"))
    assert nobody == access.NOBODY
    assert not nobody.authenticated


@pytest.mark.parametrize("cookie", ["sessionid=", 'sessionid="\\000aaaaaaaa"', "sessionid=é"])
async def test_a_cookie_that_is_no_session_is_nobodys(cookie: str) -> None:
    connection = scope(origin="http://shop.example", cookie=cookie)
    assert await access.identify(connection) == access.NOBODY


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ({}, None),
        ({"authorization": "Basic abc"}, None),
        ({"authorization": "Bearer"}, ""),
        ({"authorization": "bearer  abc "}, "abc"),
    ],
)
def test_bearer_token(header: dict[str, str], expected: str | None) -> None:
    assert access.bearer_token(access.request_of(scope("http", **header))) == expected
