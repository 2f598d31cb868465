"""The peers' no-op task, each with its worker as its documentation advises.

    python -m tests.benchmarks.job_peers procrastinate DSN CONCURRENCY
    dramatiq tests.benchmarks.job_peers:broker

Every peer keeps what became of a job: rows in the database, or results in Redis.
"""

from __future__ import annotations

import os
import sys
from typing import Any

QUEUE = "bench"


def _noop(number: int) -> int:
    return number


def procrastinate_app(dsn: str) -> tuple[Any, Any]:
    """Return procrastinate's app on this database, and the task."""
    from procrastinate import App, PsycopgConnector, SyncPsycopgConnector

    connector = PsycopgConnector(conninfo=dsn) if __name__ == "__main__" else None
    app = App(connector=connector or SyncPsycopgConnector(conninfo=dsn))

    return app, app.task(queue=QUEUE, name="noop")(_noop)


def dramatiq_broker() -> tuple[Any, Any]:
    """Return dramatiq's broker on the benchmark's Redis, and the actor."""
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker
    from dramatiq.results import Results
    from dramatiq.results.backends import RedisBackend

    url = os.environ["ECHOMQ_BENCH_REDIS"]
    broker = RedisBroker(url=url)
    broker.add_middleware(Results(backend=RedisBackend(url=url)))
    dramatiq.set_broker(broker)

    return broker, dramatiq.actor(actor_name="noop", queue_name=QUEUE, store_results=True)(_noop)


def __getattr__(name: str) -> Any:
    """Make the broker when dramatiq's command asks for it."""
    if name == "broker":
        return dramatiq_broker()[0]
    raise AttributeError(name)


if __name__ == "__main__":
    _, dsn, concurrency = sys.argv[1:]
    app, _noop = procrastinate_app(dsn)
    app.run_worker(queues=[QUEUE], concurrency=int(concurrency))
