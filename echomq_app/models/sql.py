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
    "echomq_fresh_v1",
    "echomq_event_id_v1",
    "echomq_append_on_commit_v1",
    "echomq_outbox_move_v1",
    "echomq_outbox_commit_v1",
    "echomq_relay_v1",
    "echomq_record_no_update_v1",
    "echomq_record_no_delete_v1",
    "echomq_stream_no_delete_v1",
    "echomq_job_text_v1",
    "echomq_claim_v1",
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

# A trigger that names another table breaks Django's rebuild of that table: this names none.
_SQLITE_GUARD = """
CREATE TRIGGER IF NOT EXISTS echomq_record_no_update_v1 BEFORE UPDATE ON echomq_record
BEGIN SELECT RAISE(ABORT, 'stream records are append-only: a record can''t be changed'); END
"""


def install(connection: BaseDatabaseWrapper) -> None:
    """Create the objects in the schema that holds our tables, or replace them."""
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute(_SQLITE_GUARD)
            return
        cursor.execute(
            "SELECT quote_ident(n.nspname) FROM pg_class c JOIN pg_namespace n"
            " ON n.oid = c.relnamespace WHERE c.oid = to_regclass('echomq_record')"
        )
        (schema,) = cursor.fetchone()
        # Function bodies are checked when they run: the order of the files doesn't matter, but
        # a row type has to exist.
        for name in SQL_FILES:
            text = resources.files(__package__).joinpath("plpgsql", name).read_text("utf-8")
            cursor.execute(text.format(schema=schema))


def remove(connection: BaseDatabaseWrapper) -> None:
    """Drop the objects; what isn't there is no error."""
    with connection.cursor() as cursor:
        for name, table in TRIGGERS[connection.vendor].items():
            where = f" ON {table}" if connection.vendor == "postgresql" else ""
            cursor.execute(f"DROP TRIGGER IF EXISTS {name}{where}")
        if connection.vendor == "postgresql":
            for name in FUNCTIONS:
                cursor.execute(f"DROP FUNCTION IF EXISTS {name}")


def missing(connection: BaseDatabaseWrapper) -> list[str]:
    """Name the objects that should be there and aren't."""
    triggers = TRIGGERS[connection.vendor]
    with connection.cursor() as cursor:
        if connection.vendor == "sqlite":
            cursor.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
            wanted: list[str] = list(triggers)
        else:
            cursor.execute(
                "SELECT proname FROM pg_proc WHERE proname LIKE 'echomq%%'"
                " AND pg_function_is_visible(oid)"
                " UNION ALL SELECT 'trigger ' || tgname FROM pg_trigger"
                " WHERE tgname LIKE 'echomq%%' AND pg_table_is_visible(tgrelid)"
            )
            wanted = [*FUNCTIONS, *(f"trigger {name}" for name in triggers)]
        found = {row[0] for row in cursor.fetchall()}
    return [name for name in wanted if name not in found]


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
    """Take SQLite's trigger away while migrations may rebuild or update its table."""
    connection = connections[using]
    if plan and connection.vendor == "sqlite" and serves(using) and tables_exist(connection):
        remove(connection)


def after_migrate(*, sender: AppConfig, using: str = DEFAULT_DB_ALIAS, **kwargs: Any) -> None:
    """Put back whatever is missing."""
    if serves(using):
        connection = connections[using]
        if tables_exist(connection) and missing(connection):
            install(connection)
