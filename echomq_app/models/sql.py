"""What the database itself does: functions and triggers, their names and installation.

PostgreSQL appends in one function (one round trip, and SQL clients can append too),
moves the outbox while a transaction commits, and refuses to change a record. SQLite
only refuses changes. Names carry a version, because during a rolling deploy the old
code calls the old function: a released object is never edited, its successor is added.

Installed by a migration, and again after every `migrate` (a project that tests with
`--nomigrations` has no migrations; SQLite drops a table's triggers when Django
rebuilds the table). Installing twice changes nothing.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from django.apps import AppConfig
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.base.schema import BaseDatabaseSchemaEditor

SQL_FILES = ("append_v1.sql", "outbox_v1.sql", "guards_v1.sql", "jobs_v1.sql")

FUNCTIONS = (
    "echomq_append_v1",
    "echomq_lock_stream_v1",
    "echomq_too_deep_v1",
    "echomq_fresh_v1",
    "echomq_event_id_v1",
    "echomq_append_on_commit_v1",
    "echomq_outbox_move_v1",
    "echomq_outbox_commit_v1",
    "echomq_relay_v1",
    "echomq_relay_from_v1",
    "echomq_record_no_update_v1",
    "echomq_record_no_delete_v1",
    "echomq_stream_no_delete_v1",
    "echomq_job_text_v1",
    "echomq_claim_v1",
    "echomq_begin_v1",
    "echomq_park_v1",
    "echomq_unpark_v1",
)

TRIGGERS = {
    "postgresql": {
        "echomq_outbox_commit_v1": "echomq_outbox",
        "echomq_record_no_update_v1": "echomq_record",
        "echomq_record_no_delete_v1": "echomq_record",
        "echomq_stream_no_delete_v1": "echomq_stream",
    },
    "sqlite": {"echomq_record_no_update_v1": "echomq_record"},
}

_PLAIN_COLUMNS = ("id", "stream_id", "position", "type", "key", "idempotency_key")

# A trigger that names another table breaks Django's rebuild of that table: this names none.
# Writing the same record over itself is passed over, see guards_v1.sql. Its JSON is compared
# part by part, because Django writes the same value as another text.
_PARTS = """(SELECT group_concat(quote(p.key) || p.type || iif(p.atom IS NULL,
    (SELECT count(*) FROM json_each(p.value)), quote(p.atom))) FROM json_tree({column}) p)"""
_SAME = " AND ".join(
    [
        *(f"NEW.{column} IS OLD.{column}" for column in _PLAIN_COLUMNS),
        *(
            f"{_PARTS.format(column=f'NEW.{column}')} IS {_PARTS.format(column=f'OLD.{column}')}"
            for column in ("data", "headers")
        ),
        "abs(julianday(NEW.recorded_at) - julianday(OLD.recorded_at)) < 2e-8",  # 1.7 ms
    ]
)
_SQLITE_GUARD = f"""
CREATE TRIGGER IF NOT EXISTS echomq_record_no_update_v1 BEFORE UPDATE ON echomq_record
BEGIN SELECT CASE WHEN {_SAME} THEN RAISE(IGNORE)
ELSE RAISE(ABORT, 'stream records are append-only: a record can''t be changed') END; END
"""

_FOUND = """
WITH home AS (
    SELECT n.oid, 'search_path=' || quote_ident(n.nspname) || ', pg_temp' AS path
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.oid = to_regclass('echomq_record')
), f AS (
    SELECT p.oid, p.proname FROM pg_proc p JOIN home ON p.pronamespace = home.oid
    WHERE p.proname LIKE 'echomq%' AND (p.proconfig IS NULL OR home.path = ANY (p.proconfig))
)
SELECT f.proname FROM f WHERE pg_function_is_visible(f.oid)
UNION ALL
SELECT 'trigger ' || t.tgname FROM pg_trigger t
JOIN f ON f.oid = t.tgfoid JOIN pg_class c ON c.oid = t.tgrelid
JOIN home ON c.relnamespace = home.oid WHERE t.tgenabled IN ('O', 'A')
"""


def install(connection: BaseDatabaseWrapper) -> None:
    """Create the objects in the schema that holds our tables, or replace them."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(_SQLITE_GUARD)
            return
        schema = _schema(cursor)
        # Function bodies are checked when they run: the order of the files doesn't matter, but
        # a row type has to exist.
        for name in SQL_FILES:
            text = resources.files(__package__).joinpath("plpgsql", name).read_text("utf-8")
            cursor.execute(text.format(schema=schema))


def remove(connection: BaseDatabaseWrapper) -> None:
    """Drop the objects; what isn't there is no error."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            for name in TRIGGERS["sqlite"]:
                cursor.execute(f"DROP TRIGGER IF EXISTS {name}")
            return
        schema = _schema(cursor)
        if schema is None:
            return
        for name, table in TRIGGERS["postgresql"].items():
            cursor.execute(f"DROP TRIGGER IF EXISTS {name} ON {schema}.{table}")
        for name in FUNCTIONS:
            cursor.execute(f"DROP FUNCTION IF EXISTS {schema}.{name}")


def missing(connection: BaseDatabaseWrapper) -> list[str]:
    """Name the objects that should be there, at work, and aren't.

    On PostgreSQL that is: in the schema of our tables, and looking there. A tool that renames
    or copies a schema leaves functions behind that write to the tables of another one.
    """
    triggers = TRIGGERS[connection.vendor]
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
            wanted: list[str] = list(triggers)
        else:
            cursor.execute(_FOUND)
            wanted = [*FUNCTIONS, *(f"trigger {name}" for name in triggers)]
        found = {row[0] for row in cursor.fetchall()}
    return [name for name in wanted if name not in found]


def _schema(cursor: Any) -> str | None:
    """Return the schema that holds our tables, quoted."""
    cursor.execute(
        "SELECT quote_ident(n.nspname) FROM pg_class c JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE c.oid = to_regclass('echomq_record')"
    )
    row = cursor.fetchone()
    return row[0] if row else None


def tables_exist(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether our tables are there: after `migrate echomq zero` they aren't."""
    return "echomq_record" in connection.introspection.table_names()


def serves(using: str) -> bool:
    """Tell whether this database holds our tables, by vendor and by the routers' word."""
    return connections[using].vendor in TRIGGERS and router.allow_migrate(
        using, "echomq", model_name="record"
    )


def migrate_forwards(apps: Any, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Install, as a migration's step."""
    if schema_editor.connection.vendor in TRIGGERS:
        install(schema_editor.connection)


def migrate_backwards(apps: Any, schema_editor: BaseDatabaseSchemaEditor) -> None:
    """Remove, as a migration's step."""
    if schema_editor.connection.vendor in TRIGGERS:
        remove(schema_editor.connection)


def before_migrate(
    *, sender: AppConfig, using: str = DEFAULT_DB_ALIAS, plan: Any = (), **kwargs: Any
) -> None:
    """Take the objects away where this app's own migrations would trip over them.

    SQLite's trigger stands in the way of a table's rebuild. On PostgreSQL they stay, for
    processes that work while we migrate, unless the way is back: without our tables nobody
    would find them any more.
    """
    ours = [backwards for migration, backwards in plan if migration.app_label == sender.label]
    connection = connections[using]
    wanted = any(ours) or (bool(ours) and connection.vendor == "sqlite")
    if wanted and serves(using) and tables_exist(connection):
        remove(connection)


def after_migrate(*, sender: AppConfig, using: str = DEFAULT_DB_ALIAS, **kwargs: Any) -> None:
    """Put back whatever is missing."""
    if serves(using):
        connection = connections[using]
        if tables_exist(connection) and missing(connection):
            install(connection)
