"""`manage.py echomq_stream`, as a person and as a script would use it."""

from __future__ import annotations

import datetime as dt
import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from echomq_app.core.names import queue_stream
from echomq_app.exceptions import UnknownStream
from echomq_app.management import stream_verbs
from echomq_app.models import Outbox, Record, appending
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Stream
from project.children import Child
from tests.wait import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "manage.py", "echomq_stream"]


def run(*arguments: str) -> str:
    """Run the command in this process, and return what it printed."""
    out = io.StringIO()
    call_command("echomq_stream", *arguments, stdout=out)
    return out.getvalue()


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--format", "json"))


def run_lines(*arguments: str) -> list[Any]:
    return [json.loads(line) for line in run(*arguments).splitlines()]


def code(*arguments: str) -> tuple[int, str]:
    """Return the exit code of a refused call, and its message."""
    with pytest.raises(CommandError) as raised:
        run(*arguments)
    assert "\n" not in str(raised.value)
    return raised.value.returncode, str(raised.value)


@pytest.fixture
def orders() -> Stream:
    stream = Stream("orders")
    stream.append_many(
        [
            {"data": {"n": n}, "type": ("placed", "paid", "shipped")[n % 3], "key": str(n % 4)}
            for n in range(12)
        ]
    )
    return stream


def numbers(lines: list[Any]) -> list[int]:
    return [line["data"]["n"] for line in lines]


class TestList:
    def test_shows_each_stream_once_in_one_statement(
        self, orders: Stream, django_assert_num_queries: Callable[..., Any]
    ) -> None:
        Stream("audit").append(1)
        orders.trim(max_records=10)
        with django_assert_num_queries(1):
            audit, listed = run_json("list")
        info = orders.info()
        assert info.oldest_at and info.newest_at
        assert (audit["name"], audit["count"]) == ("audit", 1)
        assert listed == {
            "name": "orders",
            "epoch": info.epoch,
            "first_position": 2,
            "write_cursor": 12,
            "count": 10,
            "oldest_at": info.oldest_at.isoformat(),
            "newest_at": info.newest_at.isoformat(),
        }

    def test_by_prefix(self, orders: Stream) -> None:
        for name in ("orders-eu", "orderz", "Orders", "zebra"):
            Stream(name).append(1)
        assert [row["name"] for row in run_json("list", "orders")] == ["orders", "orders-eu"]

    def test_table_is_aligned_and_has_no_trailing_blanks(self, orders: Stream) -> None:
        Stream("a-long-name-of-a-stream").append(1)
        lines = run("list").splitlines()
        assert lines[0].startswith("name  ") and "write_cursor" in lines[0]
        assert [line.split()[0] for line in lines[1:]] == ["a-long-name-of-a-stream", "orders"]
        column = lines[0].index("write_cursor") + len("write_cursor")
        assert [line[:column].split()[-1] for line in lines[1:]] == ["1", "12"]
        assert all(line == line.rstrip() for line in lines)

    def test_nothing(self) -> None:
        assert run_json("list") == []
        assert run("list", "--format", "jsonl") == ""
        assert len(run("list").splitlines()) == 1


def test_info(orders: Stream) -> None:
    orders.set_retention(max_age=dt.timedelta(days=7))
    info = run_json("info", "orders")
    assert (info["token"], info["count"]) == (orders.info().token, 12)
    assert (info["max_records"], info["max_age"]) == (None, 604_800)
    table = dict(line.split(maxsplit=1) for line in run("info", "orders").splitlines())
    assert table["write_cursor"] == "12" and table["max_records"] == "-"


class TestAppend:
    def test_prints_the_receipt(self) -> None:
        receipt = run_json("append", "orders", '{"n": 1}', "--type", "placed", "--key", "7")
        (record,) = Stream("orders").read().records
        assert receipt["id"] == str(record.id) and receipt["token"] == record.token
        assert (record.data, record.type, record.key) == ({"n": 1}, "placed", "7")

    def test_all_options(self) -> None:
        same = ("append", "orders", "1", "--idempotency-key", "once", "--headers", '{"h": 2}')
        assert run_json(*same)["duplicate"] is False
        assert run_json(*same)["duplicate"] is True
        run("append", "orders", "2", "--expected-cursor", "1")
        status, message = code("append", "orders", "3", "--expected-cursor", "1")
        assert status == 1 and "cursor 2" in message
        first, second = Stream("orders").read().records
        assert (first.headers, second.data) == ({"h": 2}, 2)

    def test_reads_the_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO('{"big": 123456789012345678901234567890}\n'))
        run("append", "orders", "-")
        assert Stream("orders").read().records[0].data == {"big": 123456789012345678901234567890}
        (line,) = run_lines("export", "orders")
        assert line["data"] == {"big": 123456789012345678901234567890}

    @pytest.mark.parametrize(
        ("name", "data"),
        [
            ("or ders", "1"),
            ("emq.default", "1"),
            ("orders", "{n: 1}"),
            ("orders", "NaN"),
            ("orders", '"\\u0000"'),
        ],
    )
    def test_bad_input_is_usage(self, name: str, data: str) -> None:
        assert code("append", name, data)[0] == 2
        assert not Record.objects.exists()


class TestRead:
    def test_from_the_beginning_by_default_and_on_by_token(self, orders: Stream) -> None:
        page = run_json("read", "orders", "-n", "5")
        assert numbers(page["records"]) == [0, 1, 2, 3, 4]
        assert (page["cursor"], page["write_cursor"]) == (5, 12)
        page = run_json("read", "orders", "--from", page["token"])
        assert numbers(page["records"]) == [5, 6, 7, 8, 9, 10, 11]
        assert page["token"] == orders.info().token

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["--from", "10"], [10, 11]),
            (["--from", "beginning", "-n", "1"], [0]),
            (["--from", "end"], []),
            (["--last", "3"], [9, 10, 11]),
            (["--last", "100", "-n", "2"], [0, 1]),
            (["--since", "1h"], list(range(12))),
            (["--since", "0s"], []),
            (["--types", "placed"], [0, 3, 6, 9]),
            (["--types", "placed,paid", "--types", "shipped", "-n", "4"], [0, 1, 2, 3]),
            (["--key", "1"], [1, 5, 9]),
            (["--key", "1", "--types", "paid"], [1]),
            (["--types", "placed", "--from", "4", "-n", "2"], [6, 9]),
        ],
    )
    def test_selects(self, orders: Stream, arguments: list[str], expected: list[int]) -> None:
        assert numbers(run_json("read", "orders", *arguments)["records"]) == expected
        assert numbers(run_lines("read", "orders", *arguments, "--format", "jsonl")) == expected

    def test_more_than_a_page_and_past_the_filters_window(self, settings: Any) -> None:
        settings.ECHOMQ = {"FILTER_WINDOW": 10}
        stream = Stream("big")
        stream.append_many(
            [{"data": n, "type": "rare" if n == 2_400 else ""} for n in range(2_500)]
        )
        assert len(run_lines("read", "big", "-n", "2400", "--format", "jsonl")) == 2_400
        (rare,) = run_json("read", "big", "--types", "rare", "-n", "1")["records"]
        assert rare["position"] == 2_400

    def test_since_a_time(self, orders: Stream) -> None:
        at = orders.info().newest_at
        assert at is not None
        later = (at + dt.timedelta(microseconds=1)).isoformat()
        assert numbers(run_json("read", "orders", "--since", at.isoformat())["records"])
        assert run_json("read", "orders", "--since", later)["records"] == []

    def test_table_is_for_people(self, orders: Stream) -> None:
        orders.append({"text": "line\nbreak \x1b[31m" + "x" * 200})
        lines = run("read", "orders", "--last", "2").splitlines()
        assert len(lines) == 3 and lines[0].split()[0] == "position"
        assert '{"n":11}' in lines[1]
        assert lines[2].endswith("…") and "\x1b" not in lines[2]

    def test_a_record_in_json(self, orders: Stream) -> None:
        (line,) = run_lines("read", "orders", "-n", "1", "--format", "jsonl")
        record = orders.read().records[0]
        assert line == {
            "id": str(record.id),
            "stream": "orders",
            "epoch": record.epoch,
            "position": 0,
            "type": "placed",
            "key": "0",
            "data": {"n": 0},
            "headers": {},
            "recorded_at": record.recorded_at.isoformat(),
            "token": record.token,
        }


class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "status", "says"),
        [
            (["read", "nothing"], 1, "no stream 'nothing'"),
            (["info", "nothing"], 1, "no stream 'nothing'"),
            (["read", "or ders"], 2, "or ders"),
            (["read", "orders", "--from", "1"], 4, "has expired"),
            (["export", "orders", "--from", "1"], 4, "has expired"),
            (["tail", "orders", "--from", "1"], 4, "has expired"),
            (["read", "orders", "--from", "13"], 4, "(ahead)"),
            (["read", "orders", "--from", "0123456789abcdef:3:"], 4, "(epoch)"),
            (["read", "orders", "--from", "a:b"], 2, "(malformed)"),
            (["trim", "--max-records", "5"], 2, "Name a stream"),
            (["trim", "nothing", "--max-records", "5"], 1, "no stream 'nothing'"),
            (["delete", "orders"], 2, "--no-input"),
            (["delete", "nothing", "--no-input"], 1, "no stream 'nothing'"),
        ],
    )
    def test_exit_codes(self, orders: Stream, arguments: list[str], status: int, says: str) -> None:
        orders.trim(max_records=10)
        found, message = code(*arguments)
        assert found == status and says in message

    @pytest.mark.parametrize(
        "arguments",
        [
            ["read"],
            ["read", "orders", "-n", "0"],
            ["read", "orders", "-n", "five"],
            ["read", "orders", "--from", "somewhere"],
            ["read", "orders", "--since", "yesterday"],
            ["read", "orders", "--since", "2026-02-30"],
            ["read", "orders", "--since", "99999999999w"],
            ["read", "orders", "--last", "3", "--from", "4"],
            ["read", "orders", "--database", "elsewhere"],
            ["read", "orders", "--format", "xml"],
            ["trim", "orders", "--max-age", "7"],
            ["fly"],
        ],
    )
    def test_usage(self, arguments: list[str]) -> None:
        with pytest.raises(CommandError):
            run(*arguments)


class TestTrim:
    def test_by_each_limit_with_a_dry_run_first(self, orders: Stream) -> None:
        (result,) = run_json("trim", "orders", "--max-records", "9", "--dry-run")
        expected = {
            "stream": "orders",
            "first_position": 3,
            "trimmed": 3,
            "dry_run": True,
            "error": "",
        }
        assert result == expected and orders.info().count == 12
        assert run_json("trim", "orders", "--max-records", "9") == [expected | {"dry_run": False}]
        assert orders.info().first_position == 3
        assert run_json("trim", "orders", "--before", "5")[0]["trimmed"] == 2
        assert run_json("trim", "orders", "--max-age", "1d")[0]["trimmed"] == 0
        assert run_json("trim", "orders", "--before", "0s")[0]["trimmed"] == 7

    def test_all_by_their_policies(self, orders: Stream) -> None:
        Stream("kept").append(1)
        orders.set_retention(max_records=1)
        (result,) = run_json("trim", "--dry-run")
        assert (result["stream"], result["trimmed"]) == ("orders", 11)
        assert orders.info().count == 12
        assert len(run_json("trim")) == 1 and run_json("trim") == []
        assert orders.info().count == 1


class TestDelete:
    def test_says_what_would_go(self, orders: Stream) -> None:
        assert "12 record(s)" in run("delete", "orders", "--dry-run")
        assert orders.info().count == 12

    @pytest.fixture
    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
        return lambda answer: monkeypatch.setattr("builtins.input", lambda prompt: answer)

    def test_asks_on_a_terminal(self, orders: Stream, terminal: Callable[[str], None]) -> None:
        terminal("y")
        assert code("delete", "orders") == (1, "Nothing was deleted.")
        assert orders.info().count == 12
        terminal("orders")
        assert "Deleted" in run("delete", "orders")
        with pytest.raises(UnknownStream):
            orders.info()

    def test_in_a_script(self, orders: Stream) -> None:
        run("delete", "orders", "--no-input")
        assert not Record.objects.exists() and not StreamRow.objects.exists()


@pytest.mark.postgres
class TestRelay:
    def wait_in_outbox(self, count: int, *names: str) -> None:
        record = {"type": "started", "key": "", "data": {}}
        Outbox.objects.bulk_create(
            Outbox(stream=name, record=record) for name in names for _ in range(count)
        )

    def test_moves_all_that_waits(self) -> None:
        self.wait_in_outbox(1_500, "emq.a", "emq.b")
        assert run_json("relay") == [
            {"stream": "emq.a", "moved": 1_500, "waiting": False},
            {"stream": "emq.b", "moved": 1_500, "waiting": False},
        ]
        assert run_json("relay") == [] and Stream("emq.b").info().count == 1_500
        assert run_json("relay", "emq.a")[0]["moved"] == 0

    def test_says_so_when_somebody_holds_the_stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stream_verbs, "_RELAY_PATIENCE", 0.1)
        appending.append("default", queue_stream("a"), [b'{"data":1}'])
        self.wait_in_outbox(1, "emq.a")
        other = connections["default"].copy()
        try:
            other.set_autocommit(False)
            with other.cursor() as cursor:
                cursor.execute("SELECT 1 FROM echomq_stream WHERE name = 'emq.a' FOR UPDATE")
            status, message = code("relay")
            assert status == 1 and "call it again" in message
            other.rollback()
        finally:
            other.close()
        assert run_json("relay")[0]["moved"] == 1


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_another_database(orders: Stream) -> None:
    run("append", "orders", '{"n": 99}', "--database", "other")
    assert numbers(run_lines("export", "orders", "--database", "other")) == [99]
    assert orders.info().count == 12


class TestFollowing:
    def test_tail_ends_at_the_end_if_asked(self, orders: Stream) -> None:
        assert numbers(run_lines("tail", "orders", "--exit-at-end")) == list(range(12))
        assert numbers(run_lines("tail", "orders", "--exit-at-end", "--last", "2")) == [10, 11]

    def test_tail_ends_after_so_many(self, orders: Stream) -> None:
        assert numbers(run_lines("tail", "orders", "--from", "3", "-n", "2")) == [3, 4]

    def test_export_is_complete_and_silent_without_a_terminal(
        self, orders: Stream, capfd: pytest.CaptureFixture[str]
    ) -> None:
        assert numbers(run_lines("export", "orders")) == list(range(12))
        assert capfd.readouterr().err == ""

    def test_only_read_has_a_limit_of_its_own(self) -> None:
        Stream("big").append_many([{"data": {"n": n}} for n in range(2_500)])
        assert numbers(run_lines("export", "big")) == list(range(2_500))
        assert numbers(run_lines("tail", "big", "--exit-at-end")) == list(range(2_500))
        assert len(run_lines("read", "big", "--format", "jsonl")) == 100

    def test_export_counts_on_a_terminal(
        self, orders: Stream, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        monkeypatch.setattr(stream_verbs, "_PROGRESS_EVERY", 0.0)
        terminal, out = Terminal(), io.StringIO()
        call_command("echomq_stream", "export", "orders", stdout=out, stderr=terminal)
        assert "7 records\r" in terminal.getvalue()
        assert terminal.getvalue().endswith("12 records\n")
        assert len(out.getvalue().splitlines()) == 12


class TestAsAProcess:
    @pytest.fixture
    def start(self, subprocess_env: dict[str, str]) -> Iterator[Callable[..., Child]]:
        children: list[Child] = []

        def start(*arguments: str) -> Child:
            children.append(Child([*COMMAND, *arguments], env=subprocess_env, cwd=ROOT))
            return children[-1]

        yield start
        for child in children:
            child.kill()

    def finish(self, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def test_one_line_on_stderr_and_the_exit_code(
        self, orders: Stream, subprocess_env: dict[str, str]
    ) -> None:
        orders.trim(max_records=10)
        for arguments, status in (
            (["read", "nothing"], 1),
            (["read", "or ders"], 2),
            (["read", "orders", "--from", "1"], 4),
        ):
            done = self.finish(subprocess_env, *arguments)
            assert (done.returncode, done.stdout) == (status, "")
            assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
        done = self.finish(subprocess_env, "read", "orders", "-n", "nil")
        assert done.returncode == 2 and "Traceback" not in done.stderr

    def test_a_database_error_is_one_line(
        self, subprocess_env: dict[str, str], tmp_path: Path
    ) -> None:
        done = self.finish({**subprocess_env, "ECHOMQ_TEST_FOLDER": str(tmp_path)}, "list")
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr

    def test_tail_prints_at_once_and_ends_with_ctrl_c(
        self, orders: Stream, start: Callable[..., Child]
    ) -> None:
        child = start("tail", "orders", "--last", "1")
        child.wait_for_output(r'"n":11')
        orders.append({"n": 12})
        child.wait_for_output(r'"n":12')
        child.send_signal(signal.SIGINT)
        assert child.wait() == 130
        assert numbers([json.loads(line) for line in child.output.splitlines()]) == [11, 12]

    def test_tail_begins_at_the_end_and_waits_for_a_stream_that_isnt_there(
        self, start: Callable[..., Child]
    ) -> None:
        child = start("tail", "later")

        def seen() -> bool:
            Stream("later").append({"n": 1})
            return '"n":1' in child.output

        wait_until(seen, poll=0.2)

    def test_tail_says_when_it_fell_behind(
        self, orders: Stream, start: Callable[..., Child]
    ) -> None:
        child = start("tail", "orders", "--from", "beginning")
        child.wait_for_output(r'"n":11')
        orders.delete()
        orders.append({"n": 0})
        assert child.wait() in (1, 4)
        assert "Traceback" not in child.output

    def test_a_reader_that_has_enough_is_no_failure(self, subprocess_env: dict[str, str]) -> None:
        Stream("big").append_many([{"data": {"n": n, "pad": "x" * 100}} for n in range(5_000)])
        for verb in ("export", "tail"):
            options = ["--from", "beginning"] if verb == "tail" else []
            with subprocess.Popen(
                [*COMMAND, verb, "big", *options],
                env=subprocess_env,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            ) as process:
                assert process.stdout and process.stderr
                assert json.loads(process.stdout.readline())["data"]["n"] == 0
                process.stdout.close()
                assert process.wait(30) == 0
                assert process.stderr.read() == b""
