"""A shop that runs its requests in transactions and remembers its orders in the log.

From the environment: SHOP_ISOLATION (SERIALIZABLE…), SHOP_LOG_DATABASE=1 (the log has a
database of its own), SHOP_POOL=1, SHOP_USE_TZ=0. The databases are those of the run that
starts this project, see tests/conftest.py; Django's test runner makes test databases beside.
"""

from __future__ import annotations

import os
from typing import Any

from psycopg import IsolationLevel

FOLDER = os.environ["ECHOMQ_TEST_FOLDER"]
POSTGRES = os.environ["ECHOMQ_TEST_DATABASE"] == "postgres"
ISOLATION = os.environ.get("SHOP_ISOLATION", "")
LOG_DATABASE = os.environ.get("SHOP_LOG_DATABASE", "")


def database(name: str) -> dict[str, Any]:
    if not POSTGRES:
        # In tests this becomes Django's default, a database in memory.
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{FOLDER}/{name}.sqlite3"}
    options: dict[str, Any] = {}
    if ISOLATION:
        options["isolation_level"] = IsolationLevel[ISOLATION]
    if os.environ.get("SHOP_POOL"):
        options["pool"] = True
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": name,
        "USER": "postgres",
        "HOST": FOLDER,
        "PORT": "5432",
        "OPTIONS": options,
    }


DATABASES = {"default": {**database("shop"), "ATOMIC_REQUESTS": True}}
if LOG_DATABASE:
    # The shop's migrations write to the log, so its test database is made first.
    DATABASES["default"]["TEST"] = {"DEPENDENCIES": ["log"]}
    DATABASES["log"] = {**database("shop_log"), "TEST": {"DEPENDENCIES": []}}
    DATABASE_ROUTERS = ["tests.acceptance.projects.shop.routers.LogRouter"]

INSTALLED_APPS = ["echomq_app", "tests.acceptance.projects.shop"]
TASKS = {"default": {"BACKEND": "echomq_app.jobs.backend.EchoMQBackend"}}
ROOT_URLCONF = "tests.acceptance.projects.shop.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SECRET_KEY = "shop"
STATIC_URL = "static/"
USE_TZ = os.environ.get("SHOP_USE_TZ", "1") == "1"
TIME_ZONE = "America/New_York"
