"""The admin of streams and records: read-only, by key, and never counting what is big."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from echomq_app.admin import records as records_module
from echomq_app.core.ids import EventId
from echomq_app.models import Record, trimming
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Stream

pytestmark = pytest.mark.django_db(transaction=True)

RECORDS = "/admin/echomq/record/"
STREAMS = "/admin/echomq/stream/"


@pytest.fixture
def sql() -> Iterator[CaptureQueriesContext]:
    """Watch all statements, and refuse those that get slow with the tables' size."""
    with CaptureQueriesContext(connection) as captured:
        yield captured
    ours = [query["sql"] for query in captured if "echomq_" in query["sql"]]
    assert ours
    for statement in ours:
        assert not re.search(r"\bOFFSET\b|\bCOUNT\s*\(", statement, re.I), statement


def filled(count: int = 130, name: str = "orders") -> Stream:
    stream = Stream(name)
    stream.append_many(
        [{"data": {"n": n}, "type": f"t{n % 3}", "key": str(n % 5)} for n in range(count)]
    )
    return stream


def page_of(client: Client, url: str) -> Any:
    """Return the change list of a page."""
    response = client.get(url)
    assert response.status_code == 200, response.status_code
    return response.context["cl"]


def positions(client: Client, url: str) -> list[int]:
    return [record.position for record in page_of(client, url).result_list]


def walk(client: Client, url: str, direction: str = "below_url") -> list[list[int]]:
    """Follow the links to the end; return the positions on each page."""
    pages, base = [], url.partition("?")[0]
    while True:
        found = page_of(client, url)
        pages.append([record.position for record in found.result_list])
        link = getattr(found, direction)
        if link is None:
            return pages
        url = base + link


@pytest.fixture
def viewer(client: Client) -> Client:
    """Give a staff user who may view streams and records, and nothing else."""
    user = User.objects.create_user("viewer", is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(codename__in=["view_stream", "view_record"])
    )
    client.force_login(user)
    return client


class TestPermissions:
    def test_a_superuser_can_only_look(self, admin_client: Client) -> None:
        filled(1)
        record, stream = Record.objects.get(), StreamRow.objects.get()
        for model, row in (("record", record), ("stream", stream)):
            change = reverse(f"admin:echomq_{model}_change", args=[row.pk])
            assert admin_client.get(change).status_code == 200
            assert admin_client.post(change, {"name": "x", "_save": "1"}).status_code == 403
            for page in ("delete", "add"):
                url = reverse(
                    f"admin:echomq_{model}_{page}", args=[row.pk] if page == "delete" else []
                )
                assert admin_client.get(url).status_code == 403
                assert admin_client.post(url, {"post": "yes"}).status_code == 403
            listed = admin_client.get(reverse(f"admin:echomq_{model}_changelist"))
            assert b"delete_selected" not in listed.content
            assert f"Add {model}".encode() not in listed.content
            data = {"action": "delete_selected", "_selected_action": str(row.pk), "post": "yes"}
            admin_client.post(reverse(f"admin:echomq_{model}_changelist"), data)
        assert Record.objects.count() == StreamRow.objects.count() == 1

    def test_view_permission_is_enough_and_needed(self, viewer: Client) -> None:
        filled(3)
        record = Record.objects.first()
        assert record is not None
        urls = [STREAMS, RECORDS, f"{RECORDS}{record.pk}/change/"]
        assert [viewer.get(url).status_code for url in urls] == [200, 200, 200]
        User.objects.get(username="viewer").user_permissions.clear()
        assert [viewer.get(url).status_code for url in urls] == [403, 403, 403]
        assert viewer.get(f"{RECORDS}?go={record.pk}").status_code == 403


class TestStreams:
    def test_list_is_one_statement_for_all_streams(
        self, admin_client: Client, sql: CaptureQueriesContext
    ) -> None:
        for number in range(5):
            filled(number + 1, f"s{number}")
        with CaptureQueriesContext(connection) as few:
            rows = page_of(admin_client, STREAMS).result_list
        assert [row.name for row in rows] == [f"s{n}" for n in range(5)]
        for number in range(5, 20):
            filled(2, f"s{number}")
        with CaptureQueriesContext(connection) as many:
            page_of(admin_client, STREAMS)
        assert len(few) == len(many) <= 4  # session, user, streams, content type

    def test_list_shows_where_each_begins_and_ends(self, admin_client: Client) -> None:
        stream = filled(30)
        stream.trim(max_records=20)
        stream.set_retention(max_records=1_000, max_age=dt.timedelta(days=7))
        Stream("empty").set_retention()
        text = admin_client.get(STREAMS).content.decode()
        info = stream.info()
        assert info.newest_at is not None
        assert ">≈ 20<" in text and ">≈ 0<" in text and f">{info.write_cursor}<" in text
        assert info.newest_at.isoformat(sep=" ", timespec="milliseconds").partition("+")[0] in text
        assert info.epoch in text and "newest 1,000 records, 7 d" in text and "keeps all" in text

    def test_pages_by_name_and_filters_by_prefix(
        self, admin_client: Client, sql: CaptureQueriesContext
    ) -> None:
        for number in range(120):
            StreamRow.objects.create(name=f"s{number:03}")
        StreamRow.objects.create(name="Zebra")
        names, url = [], STREAMS
        while True:
            found = page_of(admin_client, url)
            names.append([row.name for row in found.result_list])
            if found.below_url is None:
                break
            url = STREAMS + found.below_url
        assert [len(page) for page in names] == [50, 50, 21]
        assert list(chain(*names)) == ["Zebra", *(f"s{n:03}" for n in range(120))]
        found = page_of(admin_client, STREAMS + "?name=s01")
        assert [row.name for row in found.result_list] == [f"s01{n}" for n in range(10)]
        assert page_of(admin_client, STREAMS + "?name=S").result_list == []

    def test_page_of_a_stream(self, admin_client: Client, sql: CaptureQueriesContext) -> None:
        stream = filled(130)
        stream.trim(max_records=100)
        row = StreamRow.objects.get()
        text = admin_client.get(f"{STREAMS}{row.pk}/change/").content.decode()
        info = stream.info()
        assert info.token in text and info.epoch in text and "≈ 100" in text
        assert f'href="{RECORDS}?stream=orders"' in text


class TestTrim:
    def url(self) -> str:
        return f"{STREAMS}{StreamRow.objects.get(name='orders').pk}/trim/"

    def test_says_first_what_would_go_then_removes_just_that(self, admin_client: Any) -> None:
        stream = filled(10)
        page = admin_client.get(self.url().replace("trim", "change")).content.decode()
        assert self.url() in page
        assert "Keep the newest" in admin_client.get(self.url()).content.decode()
        shown = admin_client.post(self.url(), {"max_records": "4"})
        assert "removes 6 records, all below position 6" in shown.content.decode()
        assert stream.info().count == 10
        stream.append({"n": 10})  # one more would go by the same limit, and doesn't
        done = admin_client.post(self.url(), {"before": "6", "confirmed": "x"}, follow=True)
        assert "6 records were removed." in done.content.decode()
        assert (stream.info().first_position, stream.info().count) == (6, 5)
        entry = LogEntry.objects.get()
        assert entry.change_message == "trim: removed 6 records below 6"

    @pytest.mark.parametrize(
        ("limits", "says"),
        [
            ({}, "Fill in one of the limits"),
            ({"confirmed": "x"}, "Fill in one of the limits"),
            ({"max_records": "-1"}, "greater than or equal to 0"),
            ({"max_records": "9" * 30}, "less than or equal to"),
            ({"max_days": "1e300"}, "less than or equal to"),
            ({"before": "x"}, "whole number"),
            ({"max_days": "1"}, "That would remove nothing"),
            ({"before": "99"}, "removes 10 records"),
        ],
    )
    def test_limits(self, admin_client: Any, limits: dict[str, str], says: str) -> None:
        stream = filled(10)
        assert says in admin_client.post(self.url(), limits).content.decode()
        assert stream.info().count == 10

    def test_needs_the_permission_to_delete_records(self, viewer: Client) -> None:
        filled(3)
        assert b"Trim" not in viewer.get(self.url().replace("trim", "change")).content
        assert viewer.get(self.url()).status_code == 403
        assert viewer.post(self.url(), {"before": "2", "confirmed": "x"}).status_code == 403
        User.objects.get(username="viewer").user_permissions.add(
            Permission.objects.get(codename="delete_record")
        )
        assert viewer.post(self.url(), {"before": "2", "confirmed": "x"}).status_code == 302
        assert viewer.get(f"{STREAMS}999999/trim/").status_code == 404

    def test_is_not_inside_the_requests_transaction(
        self, admin_client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        filled(3)
        monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
        seen = []
        whole = trimming.delete_below

        def watched(using: str, name: str) -> int:
            seen.append(connection.in_atomic_block)
            return whole(using, name)

        monkeypatch.setattr(trimming, "delete_below", watched)
        admin_client.post(self.url(), {"before": "2", "confirmed": "x"})
        assert seen == [False]


class TestRecords:
    def test_pages_of_a_stream_hold_each_record_once_newest_first(
        self, admin_client: Client, sql: CaptureQueriesContext
    ) -> None:
        filled(130), filled(3, "other")
        url = RECORDS + "?stream=orders"
        down = walk(admin_client, url)
        assert [len(page) for page in down] == [50, 50, 30]
        assert list(chain(*down)) == list(range(129, -1, -1))
        last = page_of(admin_client, f"{url}&below=30")
        up = walk(admin_client, RECORDS + last.above_url, "above_url")
        assert up == [list(range(79, 29, -1)), list(range(129, 79, -1))]

    def test_going_up_to_the_top_gives_a_whole_page(self, admin_client: Client) -> None:
        filled(130)
        assert positions(admin_client, f"{RECORDS}?stream=orders&above=120") == list(
            range(129, 79, -1)
        )

    def test_a_page_stays_where_it_is_while_records_come(self, admin_client: Client) -> None:
        stream = filled(60)
        url = RECORDS + page_of(admin_client, RECORDS + "?stream=orders").below_url
        before = positions(admin_client, url)
        stream.append_many([{"data": {"n": n}} for n in range(100)])
        assert positions(admin_client, url) == before == list(range(9, -1, -1))

    def test_without_a_stream_by_id_which_is_by_time(
        self, admin_client: Client, sql: CaptureQueriesContext
    ) -> None:
        for number in range(6):
            filled(20, f"s{number % 3}")
        url, ids = RECORDS, []
        while True:
            found = page_of(admin_client, url)
            ids += [record.pk for record in found.result_list]
            if found.below_url is None:
                break
            url = RECORDS + found.below_url
        assert len(ids) == 120 and ids == sorted(ids, reverse=True)
        found = page_of(admin_client, RECORDS + found.above_url)
        assert [record.pk for record in found.result_list] == ids[20:70] or len(ids) == 120

    def test_costs_few_statements_however_many_records(
        self, admin_client: Client, sql: CaptureQueriesContext
    ) -> None:
        counts = []
        for number in range(2):
            filled(60, f"s{number}")
            for url in (RECORDS, RECORDS + "?stream=s0", RECORDS + "?stream=s0&key=1"):
                with CaptureQueriesContext(connection) as captured:
                    page_of(admin_client, url)
                counts.append(len(captured))
        # session, user, content type, names to suggest, the stream, records, their streams
        assert max(counts) <= 7

    def test_lists_no_payload_whole(self, admin_client: Client) -> None:
        Stream("big").append({"text": "<b>" + "x" * 100_000}, headers={"secret": "y" * 1_000})
        with CaptureQueriesContext(connection) as captured:
            text = admin_client.get(RECORDS).content.decode()
        assert len(text) < 20_000 and "&lt;b&gt;xxx" in text and "…" in text
        (statement,) = (q["sql"] for q in captured if '"echomq_record"."position"' in q["sql"])
        assert '"headers"' not in statement

    def test_trimmed_records_that_are_still_there_are_not_shown(self, admin_client: Client) -> None:
        filled(10)
        StreamRow.objects.update(first_position=7)
        assert positions(admin_client, RECORDS + "?stream=orders") == [9, 8, 7]


class TestFilters:
    def test_by_key_and_type(self, admin_client: Client, sql: CaptureQueriesContext) -> None:
        filled(130), filled(130, "other")
        url = RECORDS + "?stream=orders"
        assert positions(admin_client, url + "&key=3") == list(range(128, -1, -5))
        expected = [n for n in range(129, -1, -1) if n % 3 == 1]
        assert walk(admin_client, url + "&type=t1") == [expected]
        assert positions(admin_client, url + "&type=t1&key=3") == [
            n for n in expected if n % 5 == 3
        ]
        assert positions(admin_client, url + "&type=none") == []

    def test_a_rare_type_is_looked_for_in_bounded_steps(
        self, admin_client: Client, monkeypatch: pytest.MonkeyPatch, sql: CaptureQueriesContext
    ) -> None:
        monkeypatch.setattr(records_module, "_WINDOW", 100)
        stream = Stream("orders")
        rare = {10: "rare", 480: "rare"}
        stream.append_many([{"data": n, "type": rare.get(n, "")} for n in range(500)])
        url = RECORDS + "?stream=orders&type=rare"
        first = page_of(admin_client, url)
        assert [r.position for r in first.result_list] == [480] and first.page.searched == 100
        assert walk(admin_client, url) == [[480], [], [], [], [10]]
        assert b"Looked at 100 rows" in admin_client.get(url).content
        up = walk(admin_client, url + "&above=5", "above_url")
        assert up == [[10], [], [], [], [480]]

    @pytest.mark.parametrize(
        ("query", "says"),
        [
            ("stream=nothing", "There is no such stream"),
            ("type=t1", "Choose a stream"),
            ("key=1", "Choose a stream"),
            ("stream=" + "x" * 80, "at most 75"),
            ("stream=%00", "Null characters"),
        ],
    )
    def test_what_cannot_be_answered_is_said_and_lists_nothing(
        self, admin_client: Client, query: str, says: str
    ) -> None:
        filled(3)
        response = admin_client.get(f"{RECORDS}?{query}")
        assert says in response.content.decode()
        assert response.context["cl"].result_list == []

    @pytest.mark.parametrize("place", ["x", "1.5", "EVT", "-", "JOB" + "0" * 26])
    @pytest.mark.parametrize("query", ["?stream=orders&below=", "?above="])
    def test_a_damaged_address_begins_at_the_start(
        self, admin_client: Client, query: str, place: str
    ) -> None:
        filled(3)
        response = admin_client.get(RECORDS + query + place)
        assert "address is damaged" in response.content.decode()
        assert len(response.context["cl"].result_list) == 3

    @pytest.mark.parametrize("place", ["a%00", "a b", "%C3%A9", "a" * 80])
    def test_a_damaged_address_of_streams_too(self, admin_client: Client, place: str) -> None:
        filled(3)
        for name in ("below", "above"):
            response = admin_client.get(f"{STREAMS}?{name}={place}")
            assert "address is damaged" in response.content.decode()
            assert [row.name for row in response.context["cl"].result_list] == ["orders"]

    @pytest.mark.parametrize("place", ["99999999999999999999", "-5", "0"])
    def test_a_place_outside_is_just_empty_or_all(self, admin_client: Client, place: str) -> None:
        filled(3)
        for name in ("below", "above"):
            assert admin_client.get(f"{RECORDS}?stream=orders&{name}={place}").status_code == 200

    def test_lookups_in_the_address_are_ignored(self, admin_client: Client) -> None:
        filled(3)
        url = RECORDS + "?stream=orders&stream__name__startswith=x&o=1&p=5&all=&_facets=1"
        assert positions(admin_client, url) == [2, 1, 0]


class TestGoTo:
    def go(self, client: Client, **query: str) -> Any:
        return client.get(RECORDS, query)

    def landed(self, client: Client, response: Any) -> list[int]:
        assert response.status_code == 302
        return positions(client, response.url)

    def test_a_position(self, admin_client: Client) -> None:
        filled(130)
        response = self.go(admin_client, go="77", stream="orders", type="t2")
        assert parse_qs(urlsplit(response.url).query)["type"] == ["t2"]
        assert self.landed(admin_client, response)[:2] == [77, 74]
        assert b"Choose a stream" in self.go(admin_client, go="77").content

    def test_an_event_id(self, admin_client: Client) -> None:
        filled(3)
        record = Record.objects.get(position=1)
        response = self.go(admin_client, go=f" {record.pk} ")
        assert response.url == f"{RECORDS}{record.pk}/change/"
        missing = EventId.from_int(record.pk.int + 1)
        assert f"no record {missing}" in self.go(admin_client, go=str(missing)).content.decode()

    def test_a_time(self, admin_client: Client) -> None:
        stream = filled(5)
        at = Record.objects.get(position=4).recorded_at
        while dt.datetime.now(dt.UTC) - at < dt.timedelta(milliseconds=2):
            pass
        later = stream.append_many([{"data": {"n": n}} for n in range(5)])[0].recorded_at
        response = self.go(admin_client, go=later.isoformat(), stream="orders")
        assert self.landed(admin_client, response) == [5, 4, 3, 2, 1, 0]
        response = self.go(admin_client, go=at.isoformat())
        assert self.landed(admin_client, response) == [4, 3, 2, 1, 0]

    @pytest.mark.parametrize("text", ["tomorrow", "EVT123", "JOB" + "0" * 26, "0x5", "²"])
    def test_nonsense_is_said(self, admin_client: Client, text: str) -> None:
        filled(3)
        response = self.go(admin_client, go=text, stream="orders")
        assert response.status_code == 200 and b"messagelist" in response.content


class TestRecordPage:
    def test_shows_all_there_is_escaped(
        self, admin_client: Client, sql: CaptureQueriesContext
    ) -> None:
        stream = Stream("orders")
        receipt = stream.append(
            {"html": "<script>alert(1)</script>", "é": [1, {"deep": None}]},
            type="placed",
            key="7",
            headers={"trace": "abc"},
            idempotency_key="once",
        )
        text = admin_client.get(f"{RECORDS}{receipt.id}/change/").content.decode()
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert "  &quot;é&quot;: [\n    1,\n    {\n      &quot;deep&quot;: null\n" in text
        for shown in (str(receipt.id), receipt.token, "&quot;trace&quot;: &quot;abc&quot;", "once"):
            assert shown in text

    def test_links_its_neighbours(self, admin_client: Client) -> None:
        first, middle, last = filled(3).read().records
        for record, older, newer in (
            (first, None, middle),
            (middle, first, last),
            (last, middle, None),
        ):
            context = admin_client.get(f"{RECORDS}{record.id}/change/").context
            for name, other in (("older_url", older), ("newer_url", newer)):
                assert context[name] == (f"{RECORDS}{other.id}/change/" if other else None)

    @pytest.mark.parametrize("id", ["EVT" + "0" * 26, "JOB" + "0" * 26, "nonsense", "1"])
    def test_one_that_is_not_there(self, admin_client: Client, id: str) -> None:
        assert admin_client.get(f"{RECORDS}{id}/change/").status_code == 302

    def test_of_a_stream_whose_row_is_gone(self, admin_client: Client) -> None:
        (record,) = filled(1).read().records
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute(
                    "ALTER TABLE echomq_stream DISABLE TRIGGER echomq_stream_no_delete_v1"
                )
            cursor.execute("DELETE FROM echomq_stream")
            if connection.vendor == "postgresql":
                cursor.execute(
                    "ALTER TABLE echomq_stream ENABLE TRIGGER echomq_stream_no_delete_v1"
                )
        assert admin_client.get(f"{RECORDS}{record.id}/change/").status_code == 200
        assert admin_client.get(RECORDS).status_code == 200


def test_reads_where_the_log_writes(
    admin_client: Client, settings: Any, django_assert_num_queries: Callable[..., Any]
) -> None:
    class Replica:
        def db_for_read(self, model: Any, **hints: Any) -> str | None:
            return "other" if model._meta.app_label == "echomq" else None

    filled(3)
    settings.DATABASE_ROUTERS = [Replica()]
    # A query on "other" is an error in this test.
    assert positions(admin_client, RECORDS + "?stream=orders") == [2, 1, 0]
    assert admin_client.get(STREAMS).status_code == 200
