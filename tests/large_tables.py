"""Tables as they are after years: large in each direction in which a statement might scan.

    records     200,000 of one stream ("big"), 40,000 of another, one in each of 20,000
    jobs        90,000 completed, 80,000 scheduled, ten thousands of each other state that stays
    the rest    tens of thousands of rows that wait in the outbox (PostgreSQL) or are unique

The same SQL fills both databases.
"""

from __future__ import annotations

from django.db.backends.base.base import BaseDatabaseWrapper

BIG, OLD, SMALL = "big", "old", 20_000
GROUPED = 3_000
"""Ready jobs of one group, which one job fills. The first claim parks them all."""

_DIALECT = {
    "postgresql": {
        "ago": "clock_timestamp() - make_interval(secs => {seconds})",
        "id": "(lpad(to_hex(((extract(epoch FROM clock_timestamp()) - {seconds}) * 1000)::bigint),"
        " 12, '0') || '70008' || lpad(to_hex({n}::bigint), 15, '0'))::uuid",
    },
    "sqlite": {
        "ago": "strftime('%Y-%m-%d %H:%M:%f', julianday('now') - ({seconds}) / 86400.0)",
        "id": "printf('%012x70008%015x',"
        " CAST((strftime('%s', 'now') - ({seconds})) * 1000 AS integer), {n})",
    },
}


def fill(connection: BaseDatabaseWrapper) -> None:
    """Write the rows, and have PostgreSQL know of them."""
    with connection.cursor() as cursor:
        for statement in _statements(connection.vendor):
            cursor.execute(statement)
        if connection.vendor == "postgresql":
            cursor.execute("VACUUM ANALYZE")


def _statements(vendor: str) -> list[str]:
    def ago(seconds: str) -> str:
        return _DIALECT[vendor]["ago"].format(seconds=seconds)

    def id(n: str, seconds: str) -> str:
        return _DIALECT[vendor]["id"].format(n=n, seconds=seconds)

    def insert(head: str, count: int, values: str, first: int = 1) -> str:
        numbers = f"SELECT {first} UNION ALL SELECT n + 1 FROM s WHERE n < {first + count - 1}"
        return f"WITH RECURSIVE s(n) AS ({numbers}) {head} SELECT {values} FROM s"

    def streams(count: int, first: int, name: str) -> str:
        head = "INSERT INTO echomq_stream (id, name, epoch, first_position, created_at)"
        return insert(head, count, f"n, {name}, '0123456789abcdef', 0, {ago('n')}", first)

    def records(count: int, first: int, stream: str, position: str, key: str) -> str:
        head = (
            "INSERT INTO echomq_record (id, stream_id, position, type, key, data, headers,"
            " idempotency_key, recorded_at)"
        )
        age = f"{first + count} - n"
        idempotency = f"CASE WHEN n % 2 = 0 THEN 'once' || ({position}) ELSE '' END"
        values = f"{stream}, {position}, 't' || (n % 3), {key}, '{{}}', '{{}}', {idempotency}"
        return insert(head, count, f"{id('n', age)}, {values}, {ago(age)}", first)

    jobs = 0

    def job(count: int, state: str, **more: str) -> str:
        nonlocal jobs
        first, jobs = jobs + 1, jobs + count
        age = "240000 - n"
        begun = "NULL" if state in {"ready", "scheduled"} else ago(age)
        given = {
            "id": id("n", age),
            "queue": "'default'",
            "task_path": "'tests.jobtasks.add'",
            "arguments": """'{"args": [1, 2], "kwargs": {}}'""",
            "priority": "0",
            "run_after": ago(age),
            "state": f"'{state}'",
            "attempt": "1",
            "max_attempts": "3",
            "options": "'{}'",
            "fence": "1",
            "worker_id": "NULL",
            "enqueued_at": ago(age),
            "started_at": begun,
            "attempted_at": begun,
            "finished_at": "NULL" if state == "running" else begun,
            "group_key": "''",
            "group_limit": "1",
            "retention": "NULL",
            **dict.fromkeys(("worker_name", "progress_note", "cancel_reason", "unique_key"), "''"),
            "errors": "'[]'",
            "parked": "false",
            **more,
        }
        head = f"INSERT INTO echomq_job ({', '.join(given)})"
        return insert(head, count, ", ".join(given.values()), first)

    requests = "INSERT INTO echomq_cancelrequest (job_id, reason, kind, requested_at)"
    soon = ago("-3600 - n")
    key = "CASE WHEN n % 5 = 0 THEN 'k' || (n % 50) ELSE '' END"
    workers = (
        "INSERT INTO echomq_worker (id, name, host, pid, queues, concurrency, started_at,"
        " heartbeat_at, expires_at, lost_at, stopped_at)"
    )
    found = [
        streams(1, 1, f"'{BIG}'"),
        streams(1, 2, f"'{OLD}'"),
        streams(SMALL, 3, "'s' || n"),
        records(200_000, 1, "1", "n - 1", key),
        records(40_000, 200_001, "2", "n - 200001", key),
        records(SMALL, 240_001, "n - 240001 + 3", "0", "''"),
        job(90_000, "completed", retention="CASE WHEN n % 2 = 0 THEN 864000.0 END"),
        job(15_000, "failed"),
        job(15_000, "cancelled"),
        job(80_000, "scheduled", run_after=soon, unique_key="'later' || n"),
        job(20_000, "ready"),
        job(GROUPED, "ready", queue="'grouped'", group_key="'group:full'"),
        job(1, "running", queue="'grouped'", group_key="'group:full'", worker_id="301"),
        job(20, "running", worker_id="301"),
        job(20, "running", worker_id="302"),
        job(20, "scheduled"),
        insert(
            workers,
            302,
            f"n, 'w' || n, 'h', n, '[\"default\"]', 1, {ago('9000')}, {ago('9000')},"
            f" CASE WHEN n = 301 THEN {ago('-9000')} ELSE {ago('60')} END, NULL,"
            f" CASE WHEN n <= 300 THEN {ago('9000 - n')} END",
        ),
        insert("INSERT INTO echomq_queue (name, pause_reason)", 200, "'q' || n, ''"),
        insert(
            "INSERT INTO echomq_uniquewindow (key, job_id, until)",
            100_000,
            f"'w' || n, {id('n', 'n')}, {ago('100 - n')}",
        ),
        f"{requests} SELECT id, '', 'user', {ago('5')} FROM echomq_job WHERE worker_id = 301",
    ]
    if vendor == "postgresql":
        head = "INSERT INTO echomq_outbox (stream, record, xact)"
        found += [
            insert(head, 20_000, f"'{name}', '{{\"data\": 1}}', NULL")
            for name in ("emq.default", "emq.busy")
        ]
        found += [
            f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), max(id)) FROM {table}"
            for table in ("echomq_stream", "echomq_worker")
        ]
    return found
