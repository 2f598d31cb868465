"""Each system check speaks up for what it is about, and is silent for a sane project."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import django
import pytest
from django.core import checks as framework
from django.core.checks import CheckMessage
from django.db import connection, connections
from pytest_django.fixtures import Settings

from echomq_app import checks
from echomq_app.models import sql
from tests.databases import database_alias


def ids(found: Any) -> list[str]:
    return [message.id for message in found]


@pytest.mark.django_db(databases=["default", "other"])
def test_the_tests_own_project_is_clean() -> None:
    found = framework.run_checks()
    assert [message for message in found if str(message.id).startswith("echomq.")] == []


def test_every_message_says_what_to_do(settings: Settings) -> None:
    settings.ECHOMQ = {"POLL_INTERVALL": 1}
    (message,) = checks.check_settings()
    assert "Did you mean 'POLL_INTERVAL'?" in message.msg
    assert message.hint and message.id == "echomq.E001"


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"LOCK_TIMEOUT": 0},
        {"LOCK_TIMEOUT": "5"},
        {"LOCK_TIMEOUT": True},
        {"AUTHORIZE": True},
        {"MASK": 1},
        {"AUTHORIZE_INTERVAL": 0},
        {"TOKEN_MAX_AGE": None},
        {"RETENTION": []},
        {"RETENTION": {"orders": 5}},
        {"RETENTION": {1: {"max_records": 5}}},
        {"RETENTION": {"orders": {"max_size": 5}}},
        {"RETENTION": {"orders": {"max_records": 1.5}}},
        {"RETENTION": {"orders": {"max_records": 0}}},
        {"RETENTION": {"orders": {"max_records": True}}},
        {"RETENTION": {"orders": {"max_age": "7d"}}},
        {"RETENTION": {"orders": {"max_age": dt.timedelta(0)}}},
        {"RETENTION": {"orders": {"max_age": float("nan")}}},
    ],
)
def test_wrong_settings(settings: Settings, wrong: object) -> None:
    settings.ECHOMQ = wrong
    assert ids(checks.check_settings()) == ["echomq.E001"]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (None, []),
        (lambda user, action, target: True, []),
        ("django.utils.crypto.get_random_string", []),
        ("shop.rules.may_read", ["echomq.E007"]),
        ("rules", ["echomq.E007"]),
        ("django.VERSION", ["echomq.E007"]),
    ],
)
@pytest.mark.parametrize("name", ["AUTHORIZE", "MASK"])
def test_rules(settings: Settings, name: str, rule: object, expected: list[str]) -> None:
    settings.ECHOMQ = {name: rule}
    assert ids(checks.check_rules()) == expected


def test_right_retention(settings: Settings) -> None:
    settings.ECHOMQ = {
        "RETENTION": {
            "orders": {"max_records": 5, "max_age": 0.5},
            "emq.*": {"max_age": dt.timedelta(days=1)},
        }
    }
    assert checks.check_settings() == []


@pytest.mark.parametrize(
    ("layers", "alias", "expected"),
    [
        ({}, "default", []),
        ({}, "feed", ["echomq.E003"]),
        ({"default": {}}, "default", []),
        ({"default": {}}, "feed", ["echomq.E003"]),
        ({"other": {}}, "default", ["echomq.E003"]),
    ],
)
def test_channel_layer_has_to_be_there(
    settings: Settings, layers: dict[str, Any], alias: str, expected: list[str]
) -> None:
    settings.CHANNEL_LAYERS = layers
    settings.ECHOMQ = {"CHANNEL_LAYER": alias}
    assert ids(checks.check_settings()) == expected


@pytest.mark.parametrize("vendor", ["mysql", "oracle", "unknown"])
def test_unsupported_database(monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    assert checks.check_vendor() == []
    monkeypatch.setattr(connection, "vendor", vendor)
    assert ids(checks.check_vendor()) == ["echomq.E002"]


TASKS = {"BACKEND": "echomq_app.jobs.backend.EchoMQBackend"}


@pytest.mark.parametrize(
    ("queues", "expected"),
    [
        (["default", "e-mail.v2", "q" * 70], []),
        (["default", "e mail", "q" * 71, 7], ["echomq.E005"] * 3),
    ],
)
def test_queue_names(settings: Settings, queues: list[Any], expected: list[str]) -> None:
    settings.TASKS = {"default": {**TASKS, "QUEUES": queues}}
    assert ids(checks.check_tasks()) == expected


def test_other_peoples_task_backends_are_theirs(settings: Settings) -> None:
    settings.TASKS = {"default": {"BACKEND": "somebody.else.Backend", "QUEUES": ["e mail"]}}
    assert ids(checks.check_tasks()) == []


def test_tasks_on_a_django_without_them(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.TASKS = {"default": TASKS}
    assert ids(checks.check_tasks()) == []
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    monkeypatch.setattr(django, "VERSION", (5, 2, 0, "final", 0))
    assert ids(checks.check_tasks()) == ["echomq.E004"]


@pytest.fixture
def redis_major(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda version: monkeypatch.setattr(metadata, "version", lambda name: version)


@pytest.mark.parametrize(
    ("hosts", "silent"),
    [
        (None, False),
        (["redis://localhost"], False),
        ([("localhost", 6379)], False),
        ([{"address": "redis://localhost"}], False),
        ([{"address": "redis://localhost", "socket_timeout": 5}], False),
        ([{"address": "redis://localhost", "socket_timeout": None}], True),
        ([{"address": "redis://a", "socket_timeout": None}, "redis://b"], False),
    ],
)
@pytest.mark.parametrize("backend", ["core.RedisChannelLayer", "pubsub.RedisPubSubChannelLayer"])
def test_redis_sockets_may_be_silent(
    settings: Settings,
    redis_major: Callable[[str], None],
    backend: str,
    hosts: object,
    silent: bool,
) -> None:
    config = {} if hosts is None else {"hosts": hosts}
    settings.CHANNEL_LAYERS = {
        "default": {"BACKEND": f"channels_redis.{backend}", "CONFIG": config},
        "memory": {"BACKEND": "channels.layers.InMemoryChannelLayer"},
    }
    redis_major("8.1.0")
    assert ids(checks.check_redis_timeouts()) == ([] if silent else ["echomq.W004"])
    redis_major("7.1.0")
    assert ids(checks.check_redis_timeouts()) == []


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (None, ["echomq.W002"]),
        ("DEFERRED", ["echomq.W002"]),
        ("IMMEDIATE", []),
        ("EXCLUSIVE", []),
    ],
)
@pytest.mark.sqlite
def test_sqlite_begins_with_the_lock(
    monkeypatch: pytest.MonkeyPatch, mode: str | None, expected: list[str]
) -> None:
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "transaction_mode", mode)
    assert ids(checks.check_sqlite_transactions()) == expected


@pytest.mark.postgres
@pytest.mark.parametrize(
    ("age", "asgi", "expected"),
    [
        (0, "project.asgi.application", []),
        (60, "project.asgi.application", ["echomq.W005"]),
        (None, "project.asgi.application", ["echomq.W005"]),
        (60, None, []),
    ],
)
def test_connections_that_stay_under_asgi(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    age: int | None,
    asgi: str | None,
    expected: list[str],
) -> None:
    settings.ASGI_APPLICATION = asgi
    monkeypatch.setitem(connection.settings_dict, "CONN_MAX_AGE", age)
    assert ids(checks.check_persistent_connections()) == expected


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
class TestInTheDatabase:
    def test_is_clean_after_migrate(self) -> None:
        assert checks.check_databases(databases=["default", "other"]) == []

    def test_is_not_looked_into_without_being_asked(
        self, django_assert_num_queries: Callable[..., Any]
    ) -> None:
        with django_assert_num_queries(0):
            assert checks.check_databases(databases=None) == []

    def test_missing_objects_are_a_warning_because_migrate_runs_the_check_first(self) -> None:
        sql.remove(connections["other"])
        try:
            found: list[CheckMessage] = checks.check_databases(databases=["default", "other"])
            assert ids(found) == ["echomq.W001"]
            assert "echomq_record_no_update_v1" in found[0].msg and "'other'" in found[0].msg
            assert "--database other" in str(found[0].hint)
            assert not found[0].is_serious()
        finally:
            sql.install(connections["other"])

    @pytest.mark.sqlite
    def test_sqlite_without_wal(self, tmp_path: Path) -> None:
        # A file of its own: the mode can't change while anybody has the file open.
        plain = {"init_command": "PRAGMA journal_mode=DELETE"}
        with database_alias("plain", NAME=str(tmp_path / "plain.sqlite3"), OPTIONS=plain) as alias:
            assert ids(checks.check_databases(databases=[alias])) == ["echomq.W003"]
