"""Django settings of the tests, also of the processes that tests start.

`conftest.py` picks the database and makes the folder, and says so in the environment,
which child processes inherit. The databases' names are the test databases' own, so
that a child finds what the test wrote.
"""

from __future__ import annotations

import os
from typing import Any

from project.settings import *  # noqa: F403
from project.settings import channel_layers

VENDOR = os.environ.get("ECHOMQ_TEST_DATABASE", "sqlite")
FOLDER = os.environ.get("ECHOMQ_TEST_FOLDER", "")


def database(name: str) -> dict[str, Any]:
    """Return the entry in DATABASES for the test database `name`."""
    if VENDOR == "postgres":
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": name,
            "USER": "postgres",
            "HOST": FOLDER,
            "PORT": "5432",
            # More than Django's four: tests hold many transactions open at once.
            "OPTIONS": {"pool": {"max_size": 32}} if os.environ.get("ECHOMQ_TEST_POOL") else {},
            "TEST": {"NAME": name},
        }
    # A real file, because threads and other processes have to see it.
    path = os.path.join(FOLDER, f"{name}.sqlite3") if FOLDER else ":memory:"
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path,
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF",
        },
        "TEST": {"NAME": path},
    }


DATABASES = {"default": database("echomq"), "other": database("echomq_other")}

# Off unless a test or its environment asks: in memory, and Redis by ECHOMQ_REDIS_URL.
CHANNEL_LAYERS = channel_layers(os.environ.get("ECHOMQ_REDIS_URL", ""))

# No QUEUES: any name will do.
TASKS = {"default": {"BACKEND": "echomq_app.jobs.backend.EchoMQBackend", "QUEUES": []}}

DEBUG = False
SECRET_KEY = "tests"
ALLOWED_HOSTS = ["*"]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
LOGGING_CONFIG = None
