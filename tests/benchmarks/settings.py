"""Django settings of the benchmarks: those of the tests, but durable.

`databases.py` makes the database and says in the environment where it is.
"""

from __future__ import annotations

import importlib.util
import os

from tests.settings import *  # noqa: F403
from tests.settings import CHANNEL_LAYERS, DATABASES, INSTALLED_APPS, TASKS, VENDOR

if VENDOR == "sqlite":
    # In WAL mode only FULL waits for the disk at each commit, as PostgreSQL does.
    DATABASES["default"]["OPTIONS"]["init_command"] = (
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL"
    )
DATABASES = {"default": DATABASES["default"]}

if _url := os.environ.get("ECHOMQ_REDIS_URL"):
    # What the peers of live pages use; see live_site.py.
    CHANNEL_LAYERS["plain"] = {
        "BACKEND": "channels_redis.core.RedisChannelLayer",
        "CONFIG": {"hosts": [{"address": _url, "socket_timeout": None}]},
    }

if importlib.util.find_spec("django_tasks_db"):
    INSTALLED_APPS += ["django_tasks_db"]
    TASKS["peer"] = {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": []}
