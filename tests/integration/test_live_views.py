"""Pages of records in JSON, and tokens for sockets, over plain Django."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import AsyncClient, Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from pytest_django.fixtures import Settings

from echomq_app.core.ids import EventId
from echomq_app.exceptions import BadToken
from echomq_app.live import access
from echomq_app.models.stream import Stream as StreamRow
from echomq_app.stream import Stream
from tests.live_client import IsoTime

pytestmark = pytest.mark.django_db


@pytest.fixture
def user() -> User:
    user = User.objects.create_user("ada", password="lovelace")
    user.user_permissions.add(Permission.objects.get(codename="view_record"))
    return user


@pytest.fixture
def reader(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def get(client: Client, name: str, **query: Any) -> tuple[int, dict[str, Any]]:
    headers = query.pop("headers", None)
    response = client.get(f"/echomq/streams/{name}", query, headers=headers)
    assert response["Content-Type"] == "application/json"
    assert "no-store" in response["Cache-Control"]
    return response.status_code, json.loads(response.content)


def test_a_page_has_the_fields_of_the_frames(reader: Client) -> None:
    receipts = Stream("orders").append_many(
        [
            {"data": {"id": 1}, "type": "placed", "key": "7", "headers": {"by": "ada"}},
            {"data": [1, "é", None]},
            {"data": "last"},
        ]
    )
    status, page = get(reader, "orders", limit=2)
    (first, second) = Stream("orders").read(limit=2).records
    assert status == 200
    assert page == {
        "type": "records",
        "since": 0,
        "records": [
            {
                "id": str(first.id),
                "position": 0,
                "type": "placed",
                "key": "7",
                "data": {"id": 1},
                "headers": {"by": "ada"},
                "recorded_at": IsoTime(first.recorded_at),
            },
            {
                "id": str(second.id),
                "position": 1,
                "type": "",
                "key": "",
                "data": [1, "é", None],
                "headers": {},
                "recorded_at": IsoTime(second.recorded_at),
            },
        ],
        "cursor": 2,
        "resume": receipts[1].token,
        "first": 0,
        "head": 3,
        "epoch": receipts[0].epoch,
    }


def test_pages_follow_one_another_by_token_and_by_number(reader: Client) -> None:
    Stream("orders").append_many([{"data": number} for number in range(5)])
    seen: list[Any] = []
    page: dict[str, Any] = {}
    while not page or page["cursor"] < page["head"]:
        query = {"cursor": page["resume"]} if page else {}
        _, page = get(reader, "orders", limit=2, **query)
        seen += [record["data"] for record in page["records"]]
    assert seen == [0, 1, 2, 3, 4]
    assert page["resume"] == Stream("orders").info().token
    status, page = get(reader, "orders", cursor=page["resume"])
    assert (status, page["records"], page["since"], page["cursor"]) == (200, [], 5, 5)
    _, page = get(reader, "orders", cursor=3)
    assert [record["data"] for record in page["records"]] == [3, 4]


def test_filters(reader: Client) -> None:
    Stream("orders").append_many(
        [{"data": n, "type": "abc"[n % 3], "key": str(n % 2)} for n in range(6)]
    )
    _, page = get(reader, "orders", types=["a", "c"])
    assert [record["data"] for record in page["records"]] == [0, 2, 3, 5]
    _, page = get(reader, "orders", types="a", key="1")
    assert [record["data"] for record in page["records"]] == [3]
    _, page = get(reader, "orders", types="none")
    assert (page["records"], page["cursor"]) == ([], 6)  # and moves past what it skipped


def test_large_numbers_and_stored_text_pass_through(reader: Client) -> None:
    Stream("orders").append({"n": 2**63 + 1, "f": 1.0, "s": "\u2028</script>"})
    response = reader.get("/echomq/streams/orders")
    assert str(2**63 + 1).encode() in response.content
    assert json.loads(response.content)["records"][0]["data"]["s"] == "\u2028</script>"


def test_no_page_ever_creates_a_stream(reader: Client) -> None:
    status, error = get(reader, "nothing")
    assert (status, error["type"], error["code"]) == (404, "error", "unknown_stream")
    assert not StreamRow.objects.exists()


@pytest.mark.parametrize("name", ["a b", "ü", "x" * 76, "a:b"])
def test_names_that_cannot_be_one(reader: Client, name: str) -> None:
    status, error = get(reader, quote(name))
    assert (status, error["code"]) == (404, "bad_name")


def test_what_was_trimmed_is_gone(reader: Client) -> None:
    token = Stream("orders").append(0).token
    Stream("orders").append_many([{"data": 1}, {"data": 2}])
    Stream("orders").trim(max_records=1)
    info = Stream("orders").info()
    for cursor in (1, token):
        status, error = get(reader, "orders", cursor=cursor)
        assert status == 410
        assert error == {
            "type": "cursor_expired",
            "reason": "trimmed",
            "requested": 1,
            "first": 2,
            "head": 3,
            "epoch": info.epoch,
            "cursor": 3,
            "resume": info.token,
        }


@pytest.mark.parametrize("malformed", ["", "x", "-1", "1.5", "first", "٣", "9" * 19, "\0"])
def test_a_malformed_cursor(reader: Client, malformed: str) -> None:
    Stream("orders").append(0)
    status, error = get(reader, "orders", cursor=malformed)
    assert (status, error["type"], error["reason"]) == (409, "cursor_expired", "malformed")
    assert (error["requested"], error["cursor"], error["first"]) == (None, 1, 0)


def test_cursors_of_another_history(reader: Client) -> None:
    token = Stream("orders").append(0).token
    epoch, cursor, tail = token.split(":")
    status, error = get(reader, "orders", cursor=2)
    assert (status, error["reason"], error["requested"]) == (409, "ahead", 2)
    status, error = get(reader, "orders", cursor=f"{epoch}:{cursor}:{int(tail, 16) ^ 1:08x}")
    assert (status, error["reason"], error["requested"]) == (409, "diverged", 1)
    Stream("orders").rotate_epoch()
    status, error = get(reader, "orders", cursor=token)
    assert (status, error["reason"], error["requested"]) == (409, "epoch", 1)
    assert error["resume"] == Stream("orders").info().token


@pytest.mark.parametrize(
    "query",
    [
        {"limit": 0},
        {"limit": 1001},
        {"limit": "ten"},
        {"from": "first"},
        {"resume": "x"},
        {"key": "\0"},
        {"key": "k" * 256},
        {"types": "t" * 101},
        {"types": [str(number) for number in range(101)]},
    ],
)
def test_bad_requests_say_why(reader: Client, query: dict[str, Any]) -> None:
    Stream("orders").append(0)
    status, error = get(reader, "orders", **query)
    assert (status, error["type"], error["code"]) == (400, "error", "bad_request")
    assert next(iter(query)).removesuffix("s") in error["message"]


def test_reads_only(reader: Client) -> None:
    Stream("orders").append(0)
    assert reader.head("/echomq/streams/orders").status_code == 200
    for method in (reader.post, reader.put, reader.delete, reader.patch):
        assert method("/echomq/streams/orders").status_code == 405


# Who may


def test_nobody_reads_by_default(user: User) -> None:
    Stream("orders").append(0)
    status, error = get(Client(), "orders")
    assert (status, error["code"]) == (403, "unauthenticated")
    user.user_permissions.clear()
    client = Client()
    client.force_login(user)
    status, error = get(client, "orders")
    assert (status, error["code"]) == (403, "denied")


def test_who_may_not_read_learns_nothing(user: User) -> None:
    Stream("orders").append(0)
    assert get(Client(), "orders") == get(Client(), "orders")
    assert get(Client(), "orders", cursor="x")[0] == get(Client(), "nothing", cursor="x")[0] == 403


def test_rule_of_the_project(settings: Settings) -> None:
    async def rule(user: Any, action: str, target: str) -> bool:
        return (action, target) == ("stream.read", "news")

    settings.ECHOMQ = {"AUTHORIZE": rule}
    for name in ("news", "orders"):
        Stream(name).append(0)
    assert get(Client(), "news")[0] == 200
    assert get(Client(), "orders")[0] == 403


def test_a_rule_that_raises_is_no_refusal(
    settings: Settings, reader: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def rule(user: Any, action: str, target: str) -> bool:
        raise LookupError

    settings.ECHOMQ = {"AUTHORIZE": rule}
    Stream("orders").append(0)
    status, error = get(reader, "orders")
    assert (status, error["code"]) == (503, "failed")
    assert "event=authorize_failed" in caplog.text


def test_a_foreign_pages_cookie_is_nobodys(reader: Client, settings: Settings) -> None:
    Stream("orders").append(0)
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        status, error = get(reader, "orders", headers=headers)
        assert (status, error["code"]) == (403, "unauthenticated")
    assert get(reader, "orders", headers={"Origin": "http://testserver"})[0] == 200
    settings.CSRF_TRUSTED_ORIGINS = ["http://evil.example"]
    assert get(reader, "orders", headers={"Origin": "http://evil.example"})[0] == 200


def test_a_token_in_the_header(user: User) -> None:
    Stream("orders").append(0)
    token = access.make_token(user)
    bearer = {"Authorization": f"Bearer {token}", "Origin": "http://elsewhere.example"}
    assert get(Client(), "orders", headers=bearer)[0] == 200
    user.is_active = False
    user.save()
    response = Client().get("/echomq/streams/orders", headers=bearer)
    assert response.status_code == 401
    assert response["WWW-Authenticate"].startswith("Bearer")
    assert json.loads(response.content)["code"] == "bad_token"


@pytest.mark.parametrize("parameter", ["token", "access_token", "auth", "authorization"])
def test_no_token_in_a_url(user: User, parameter: str) -> None:
    Stream("orders").append(0)
    token = access.make_token(user)
    status, error = get(Client(), "orders", **{parameter: token})
    assert status == 400
    assert "Authorization" in error["message"]
    assert token not in str(error)


# Under both kinds of server


@pytest.mark.django_db(transaction=True)
async def test_under_asgi(user: User) -> None:
    await Stream("orders").aappend(0)
    client = AsyncClient()
    await client.aforce_login(user)
    response = await client.get("/echomq/streams/orders?limit=1")
    assert response.status_code == 200
    record = json.loads(response.content)["records"][0]
    assert EventId.parse(record["id"]).position == 0


@pytest.mark.django_db(transaction=True)
def test_a_page_is_one_statement_and_no_transaction(
    reader: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ATOMIC_REQUESTS it would take SQLite's write lock, to read."""
    Stream("orders").append(0)
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    with CaptureQueriesContext(connection) as queries:
        assert get(reader, "orders")[0] == 200
    texts = [query["sql"] for query in queries]
    assert len([sql for sql in texts if "echomq_record" in sql]) == 1
    assert not [sql for sql in texts if sql.startswith(("BEGIN", "SAVEPOINT"))]


def test_events_through_django_say_what_is_missing(reader: Client) -> None:
    address = reverse("echomq:events", args=["orders"])
    response = reader.get(address)
    assert response.status_code == 501
    assert "from echomq_app.routing import http" in response.content.decode()
    assert reader.post(address).status_code == 405


# Tokens


def test_a_session_gets_a_token(user: User, reader: Client) -> None:
    response = reader.post("/echomq/token")
    assert response.status_code == 200
    assert "no-store" in response["Cache-Control"]
    answer = json.loads(response.content)
    assert answer["expires_in"] == 300.0
    Stream("orders").append(0)
    bearer = {"Authorization": f"Bearer {answer['token']}"}
    assert get(Client(), "orders", headers=bearer)[0] == 200


def test_no_token_for_nobody(user: User) -> None:
    response = Client().post("/echomq/token")
    assert (response.status_code, json.loads(response.content)["code"]) == (403, "unauthenticated")
    bearer = {"Authorization": f"Bearer {access.make_token(user)}"}
    assert Client().post("/echomq/token", headers=bearer).status_code == 403  # no token of a token


@pytest.mark.parametrize("middleware", [True, False])
def test_a_token_asks_for_djangos_csrf_token(
    user: User, settings: Settings, middleware: bool
) -> None:
    if not middleware:
        settings.MIDDLEWARE = [name for name in settings.MIDDLEWARE if "Csrf" not in name]
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    assert client.post("/echomq/token").status_code == 403
    assert client.get("/echomq/token").status_code == 405


def test_bad_token_is_an_error_of_the_app() -> None:
    assert issubclass(BadToken, ValueError)
