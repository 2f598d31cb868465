"""System checks: wrong configuration is found at start, not at the first message.

`docs/settings.md` lists them all. Those that look into a database run where Django runs
such checks: in `migrate`, and in `check --database default`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import django
from channels.layers import channel_layers
from django.core import checks
from django.core.checks import CheckMessage, Tags, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.module_loading import import_string

from . import conf
from .core.names import check_queue_name
from .core.payload import encode
from .exceptions import InvalidArgument, InvalidName
from .layers.options import LayerOptions
from .models import Record, sql

_TASK_BACKENDS = "echomq_app.jobs."
_WRITES_AHEAD = frozenset({"wal", "memory"})


@register()
def check_settings(app_configs: object = None, **kwargs: Any) -> list[CheckMessage]:
    """`settings.ECHOMQ` holds what it may, and the channel layer it names is there."""
    try:
        alias = conf.current().CHANNEL_LAYER
    except ImproperlyConfigured as error:
        return [
            checks.Error(
                str(error),
                hint="Correct the ECHOMQ dict in your settings; docs/settings.md lists what it "
                "may hold.",
                id="echomq.E001",
            )
        ]
    layers = channel_layers.configs
    # No layer at all is fine: readers poll, and the feed has no listeners.
    if alias in layers or (not layers and alias == "default"):
        return []
    return [
        checks.Error(
            f"ECHOMQ['CHANNEL_LAYER'] is {alias!r}, and CHANNEL_LAYERS has no such alias.",
            hint=f"CHANNEL_LAYERS has: {', '.join(map(repr, layers)) or 'nothing'}. Add the "
            "layer, or name one of these.",
            id="echomq.E003",
        )
    ]


@register()
def check_rules(app_configs: object = None, **kwargs: Any) -> list[CheckMessage]:
    """The paths in ECHOMQ["AUTHORIZE"] and ["MASK"] lead to something that can be called."""
    try:
        ours = conf.current()
    except ImproperlyConfigured:
        return []  # check_settings says so
    return [
        checks.Error(
            f"ECHOMQ[{name!r}] is {getattr(ours, name)!r}, and that {problem}.",
            hint=f"Name a function {form}. Until then no page gets anything.",
            id="echomq.E007",
        )
        for name, form in conf.RULES.items()
        if (problem := _wrong_path(getattr(ours, name)))
    ]


def _wrong_path(path: object) -> str:
    """Say what is wrong with the dotted path of something callable; empty if nothing is."""
    if not isinstance(path, str):
        return ""
    try:
        what = import_string(path)
    except ImportError as error:
        return f"leads nowhere: {error}"
    return "" if callable(what) else f"leads to {what!r}, which can't be called"


@register()
def check_vendor(app_configs: object = None, **kwargs: Any) -> list[CheckMessage]:
    """The log lives in a database that can hold it."""
    alias = router.db_for_write(Record)
    vendor = connections[alias].vendor
    if vendor in sql.TRIGGERS:
        return []
    return [
        checks.Error(
            f"The log's database {alias!r} is of the kind {vendor!r}; EchoMQ needs PostgreSQL "
            "or SQLite.",
            hint="Add a PostgreSQL or SQLite database to DATABASES and route the app label "
            "'echomq' to it in DATABASE_ROUTERS.",
            id="echomq.E002",
        )
    ]


@register()
def check_tasks(app_configs: object = None, **kwargs: Any) -> Iterator[CheckMessage]:
    """Our backends in TASKS can be imported, and their queues have names that can be one."""
    backends = {
        alias: options
        for alias, options in conf.project_setting("TASKS", {}).items()
        if str(options.get("BACKEND", "")).startswith(_TASK_BACKENDS)
    }
    if backends and django.VERSION < (6, 0) and find_spec("django_tasks") is None:
        yield checks.Error(
            f"TASKS[{next(iter(backends))!r}] is an EchoMQ backend, and Django "
            f"{django.get_version()} has no Tasks.",
            hint="Install the backport, django-tasks, or Django 6.0 or newer.",
            id="echomq.E004",
        )
    for alias, options in backends.items():
        for queue in options.get("QUEUES", ()):
            try:
                check_queue_name(queue)
            except InvalidName as error:
                yield checks.Error(
                    f"TASKS[{alias!r}]['QUEUES'] has a name that can't be one: {error}",
                    hint="Rename the queue here and where tasks name it.",
                    id="echomq.E005",
                )


@register()
def check_schedule(app_configs: object = None, **kwargs: Any) -> Iterator[CheckMessage]:
    """Every recurring job has an expression that comes true, and a task that can be enqueued."""
    try:
        ours = conf.current().SCHEDULE
    except ImproperlyConfigured:
        return  # check_settings says so
    if not ours:
        return
    # With no recurring jobs, a project without tasks needs nothing of this.
    from .jobs import schedule
    from .jobs.backend import EchoMQBackend

    for name, given in ours.items():
        try:
            entry = schedule.entry(name, given)
            task = entry.prepared()
            encode({"args": entry.args, "kwargs": entry.kwargs}, what="args and kwargs")
            if not isinstance(task.get_backend(), EchoMQBackend):
                raise InvalidArgument(f"{given['task']} has another backend than EchoMQ's.")
        except Exception as error:  # noqa: BLE001  (an import may raise anything)
            yield checks.Error(
                f"ECHOMQ['SCHEDULE'][{name!r}]: {error}",
                hint="docs/jobs.md says what a schedule may hold.",
                id="echomq.E009",
            )


@register()
def check_sqlite_transactions(app_configs: object = None, **kwargs: Any) -> list[CheckMessage]:
    """SQLite takes the write lock at BEGIN."""
    connection = connections[router.db_for_write(Record)]
    mode = connection.settings_dict["OPTIONS"].get("transaction_mode") or ""
    if connection.vendor != "sqlite" or mode.upper() in ("IMMEDIATE", "EXCLUSIVE"):
        return []
    return [
        checks.Warning(
            f"The SQLite database {connection.alias!r} begins transactions without the write "
            "lock: two that read before they write end in 'database is locked'.",
            hint="Set 'OPTIONS': {'transaction_mode': 'IMMEDIATE', 'timeout': 20} in DATABASES"
            f"[{connection.alias!r}].",
            id="echomq.W002",
        )
    ]


@register()
def check_persistent_connections(app_configs: object = None, **kwargs: Any) -> list[CheckMessage]:
    """Under ASGI no connection outlives its request, but in a pool."""
    connection = connections[router.db_for_write(Record)]
    if connection.vendor != "postgresql" or not conf.project_setting("ASGI_APPLICATION"):
        return []
    if connection.settings_dict.get("CONN_MAX_AGE") == 0:
        return []
    return [
        checks.Warning(
            f"DATABASES[{connection.alias!r}] has CONN_MAX_AGE, and this is an ASGI project: each "
            "request may run in a new thread, and every thread keeps its connection.",
            hint="Set CONN_MAX_AGE to 0 and use the pool: 'OPTIONS': {'pool': True}.",
            id="echomq.W005",
        )
    ]


@register()
def check_redis_timeouts(app_configs: object = None, **kwargs: Any) -> Iterator[CheckMessage]:
    """redis-py 8 and newer doesn't give up on an idle subscription."""
    if _major_version("redis") < 8:
        return
    for alias, layer in channel_layers.configs.items():
        if not str(layer.get("BACKEND", "")).startswith("channels_redis."):
            continue
        hosts = (layer.get("CONFIG") or {}).get("hosts") or [None]
        if all(_waits_for_ever(host) for host in hosts):
            continue
        yield checks.Warning(
            f"CHANNEL_LAYERS[{alias!r}]: redis-py 8 gives up on a socket that is silent for 5 s, "
            "and one that waits for messages is: receivers fail when nothing happens.",
            hint='Write each of CONFIG["hosts"] as a dict with "socket_timeout": None, as in '
            '{"address": "redis://localhost:6379", "socket_timeout": None}.',
            id="echomq.W004",
        )


@register()
def check_echo_layers(app_configs: object = None, **kwargs: Any) -> Iterator[CheckMessage]:
    """Every EchoChannelLayer can be made, and its transport leads to other processes."""
    for alias, layer in channel_layers.configs.items():
        if not str(layer.get("BACKEND", "")).endswith("layers.EchoChannelLayer"):
            continue
        try:
            transport = LayerOptions.from_config(layer.get("CONFIG") or {}).transport_settings()
        except ImproperlyConfigured as error:
            yield checks.Error(
                f"CHANNEL_LAYERS[{alias!r}]: {error}",
                hint="docs/layer.md lists the options.",
                id="echomq.E008",
            )
            continue
        if transport is not None and str(transport["BACKEND"]).endswith("InMemoryChannelLayer"):
            yield checks.Warning(
                f"CHANNEL_LAYERS[{alias!r}] has an in-memory layer as its transport, and that "
                "carries nothing anywhere.",
                hint='Leave out "transport": the layer then works within this process.',
                id="echomq.W006",
            )


@register(Tags.database)
def check_databases(
    app_configs: object = None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """Our functions and triggers are in the database, and SQLite writes ahead."""
    ours = [connections[alias] for alias in databases or () if sql.serves(alias)]
    return list(itertools.chain.from_iterable(_check_database(one) for one in ours))


def _check_database(connection: BaseDatabaseWrapper) -> Iterable[CheckMessage]:
    alias = connection.alias
    # A warning, not an error: `migrate`, which puts them back, runs this check first.
    missing = sql.missing(connection) if sql.tables_exist(connection) else []
    if missing:
        yield checks.Warning(
            f"The database {alias!r} lacks what EchoMQ installs in it: {', '.join(missing)}.",
            hint=f"Run: manage.py migrate echomq --database {alias}",
            id="echomq.W001",
        )
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA journal_mode")
            mode = str(cursor.fetchone()[0])
        if mode not in _WRITES_AHEAD:
            yield checks.Warning(
                f"The SQLite database {alias!r} has journal mode {mode!r}: readers and writers "
                "wait for each other.",
                hint="Set 'OPTIONS': {'init_command': 'PRAGMA journal_mode=WAL; PRAGMA "
                f"synchronous=NORMAL'}} in DATABASES[{alias!r}].",
                id="echomq.W003",
            )


def _waits_for_ever(host: Any) -> bool:
    return isinstance(host, dict) and host.get("socket_timeout", 5) is None


def _major_version(package: str) -> int:
    try:
        return int(metadata.version(package).partition(".")[0])
    except (metadata.PackageNotFoundError, ValueError):
        return 0
