"""The run's database, its servers, and a guard against leaked threads.

    pytest                                      SQLite, in a file
    pytest --database=postgres                  a private PostgreSQL
    pytest --database=postgres -m database      without the tests that use no database

See CONTRIBUTING.md for the fixtures.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from django.conf import settings

from project.private_redis import find_redis_server
from tests.servers import (
    AsgiServer,
    Postgres,
    Redis,
    find_postgres,
    private_asgi,
    private_folder,
    private_postgres,
    private_redis,
)
from tests.threads import lasting_threads
from tests.wait import TimedOut, wait_until

pytest_plugins = ["tests.emptying", "tests.reporting", "tests.statements"]

DATABASE_FIXTURES = {"db", "transactional_db", "postgres_server", "subprocess_env", "live_server"}

CHAOS = Path(__file__).parent / "chaos"

# How much Hypothesis tries; `make chaos` picks the last.
hypothesis.settings.register_profile("tests", deadline=None, max_examples=50)
hypothesis.settings.register_profile("chaos", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("echomq")
    group.addoption(
        "--database",
        choices=["sqlite", "postgres"],
        default="sqlite",
        help="what the tests run on; POSTGRES_BIN=/folder picks the PostgreSQL",
    )
    group.addoption("--pool", action="store_true", help="with Django's connection pool (postgres)")


def pytest_configure(config: pytest.Config) -> None:
    """Say in the environment what tests/settings.py has to be; child processes inherit it."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        return  # with pytest-xdist (-n 2), each of the workers has servers of its own
    if settings.configured:
        raise pytest.UsageError(
            "Django's settings are loaded before the run has a folder and a database of its own; "
            "run without DJANGO_SETTINGS_MODULE in the environment and without --ds."
        )
    stack = contextlib.ExitStack()
    config.add_cleanup(stack.close)
    os.environ["ECHOMQ_TEST_FOLDER"] = str(stack.enter_context(private_folder("emq-tests-")))
    os.environ["ECHOMQ_TEST_DATABASE"] = config.getoption("database")
    os.environ["ECHOMQ_TEST_POOL"] = "1" if config.getoption("pool") else ""
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    os.environ.pop("ECHOMQ_REDIS_URL", None)  # the developer's own isn't for tests
    os.environ.pop("ECHOMQ_DATABASE", None)
    # pytest-django's own hook, which runs last, sets up what is configured by then.
    settings.DATABASES  # noqa: B018


def pytest_report_header(config: pytest.Config) -> str:
    database = config.getoption("database")
    programs = f" of {find_postgres()}" if database == "postgres" else ""
    return f"echomq: {database}{programs}, redis {find_redis_server()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what uses a database, and skip what is for the other one.

    What tests/chaos takes over from another file differs by the profile alone, so it runs
    there with that of `make chaos`.
    """
    chosen = config.getoption("database")
    chaos = hypothesis.settings.get_current_profile_name() == "chaos"
    for item in items:
        if not chaos and _is_taken_over(item):
            item.add_marker(pytest.mark.skip(reason="runs where it is written"))
        for vendor in ("sqlite", "postgres"):
            if item.get_closest_marker(vendor):
                item.add_marker("database")
                if vendor != chosen:
                    item.add_marker(pytest.mark.skip(reason=f"only on {vendor}"))
        if _uses_database(item):
            item.add_marker("database")


def _is_taken_over(item: pytest.Item) -> bool:
    """Tell whether a test in tests/chaos was written elsewhere."""
    written_in = getattr(getattr(item, "function", None), "__module__", "")
    return item.path.parent == CHAOS and not written_in.startswith("tests.chaos.")


def _uses_database(item: pytest.Item) -> bool:
    fixtures = set(getattr(item, "fixturenames", ()))
    return (
        item.get_closest_marker("django_db") is not None
        or bool(fixtures & DATABASE_FIXTURES)
        or hasattr(getattr(item, "cls", None), "databases")  # Django's TestCase classes
    )


@pytest.fixture(scope="session")
def postgres_server(pytestconfig: pytest.Config) -> Iterator[Postgres]:
    """Give the server that holds the test database (`--database=postgres` only)."""
    if pytestconfig.getoption("database") != "postgres":
        pytest.fail("postgres_server without @pytest.mark.postgres on the test")
    with private_postgres(folder=Path(os.environ["ECHOMQ_TEST_FOLDER"])) as server:
        yield server


@pytest.fixture(scope="session")
def django_db_modify_db_settings(request: pytest.FixtureRequest) -> None:
    """Start PostgreSQL, if that is the database, before Django makes its test databases."""
    if request.config.getoption("database") == "postgres":
        request.getfixturevalue("postgres_server")


@pytest.fixture(scope="session")
def django_db_keepdb() -> bool:
    """Don't drop the test databases: they go with their folder, connections open or not."""
    return True


@pytest.fixture
def subprocess_env(transactional_db: None) -> dict[str, str]:
    """Give the environment for a process that works on the test database.

    The test's data is committed, so the process sees it (`transactional_db`).
    """
    return dict(os.environ)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis]:
    """Give the run's Redis. Don't stop it: a test that does takes `make_redis`."""
    with private_redis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: Redis) -> str:
    """Give the URL of the run's Redis, emptied."""
    redis_server.flush()
    return redis_server.url


@pytest.fixture
def make_redis() -> Iterator[Callable[..., Redis]]:
    """Give a function that starts a Redis for this test alone (`tcp=True`: on a port)."""
    with contextlib.ExitStack() as stack:
        yield lambda *, tcp=False: stack.enter_context(private_redis(tcp=tcp))


@pytest.fixture
def make_asgi(subprocess_env: dict[str, str]) -> Iterator[Callable[..., AsgiServer]]:
    """Give a function that starts a server on the test database; see `private_asgi`.

    `make_asgi("project.asgi:application", server="daphne", env={"ADDED": "1"})`.
    """
    with contextlib.ExitStack() as stack:

        def start(
            application: str = "project.asgi:application",
            *,
            server: str = "uvicorn",
            env: dict[str, str] | None = None,
        ) -> AsgiServer:
            whole = {**subprocess_env, **(env or {})}
            return stack.enter_context(private_asgi(application, server=server, env=whole))

        yield start


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves a thread which would keep the process alive."""
    before = set(threading.enumerate())
    yield
    with contextlib.suppress(TimedOut):
        wait_until(lambda: not lasting_threads(since=before), timeout=2.0)
    left = lasting_threads(since=before)
    if left:
        names = ", ".join(sorted(thread.name for thread in left))
        pytest.fail(f"threads still run after the test: {names}; join them or make them daemons")


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the SQL about streams that this process sends, in any thread."""
    from django.db.backends.utils import CursorWrapper

    sent: list[str] = []
    execute = CursorWrapper.execute

    def counting(self: CursorWrapper, sql: Any, params: Any = None) -> Any:
        if "echomq_stream" in str(sql):
            sent.append(str(sql))
        return execute(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", counting)
    return sent
