"""Settings of the host project: the demo, and a sample of a sane set-up.

From the environment:

ECHOMQ_DATABASE    a URL, postgresql://user:password@host:5432/name. Without it,
                   SQLite in the demo's folder.
ECHOMQ_DEMO_DIR    that folder; .demo/ beside manage.py by default.
ECHOMQ_REDIS_URL   redis://host:6379/0 or unix:///path. Without it, messages stay
                   within one process.
SECRET_KEY         needed when DEBUG is off.
DEBUG              1 (the default) or 0.
ALLOWED_HOSTS      comma-separated; this machine by default.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import django

BASE_DIR = Path(__file__).resolve().parent.parent
DEMO_DIR = Path(os.environ.get("ECHOMQ_DEMO_DIR") or BASE_DIR / ".demo")

DEBUG = os.environ.get("DEBUG", "1") == "1"
SECRET_KEY = os.environ.get("SECRET_KEY") or ("only-for-the-demo" if DEBUG else "")
ALLOWED_HOSTS = os.environ.get("ALLOWED_HOSTS", "127.0.0.1,localhost,[::1]").split(",")


def databases(url: str) -> dict[str, dict[str, Any]]:
    """Return DATABASES for a PostgreSQL URL, or for SQLite if it is empty."""
    if not url:
        DEMO_DIR.mkdir(parents=True, exist_ok=True)  # SQLite makes its file, not the folder
        # The write lock is taken at BEGIN and readers don't wait for writers: with
        # Django's defaults two processes that read before they write end in
        # "database is locked".
        return {
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": DEMO_DIR / "db.sqlite3",
                "OPTIONS": {
                    "transaction_mode": "IMMEDIATE",
                    "timeout": 20,
                    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
                },
            }
        }
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    return {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": unquote(parts.path.lstrip("/")),
            "USER": unquote(parts.username or ""),
            "PASSWORD": unquote(parts.password or ""),
            # A folder with a unix socket can't stand in the host part of a URL.
            "HOST": query.pop("host", parts.hostname or ""),
            "PORT": str(parts.port or ""),
            # Under ASGI each request may run in a new thread: persistent connections
            # (CONN_MAX_AGE) would pile up, a pool doesn't.
            "OPTIONS": {"pool": True, **query},
        }
    }


def channel_layers(redis_url: str) -> dict[str, dict[str, Any]]:
    """Return CHANNEL_LAYERS with an EchoChannelLayer: over Redis, or alone if the URL is empty."""
    echo = "echomq_app.layers.EchoChannelLayer"
    if not redis_url:
        # It ends at this process, and is safe between its threads and event loops.
        return {"default": {"BACKEND": echo}}
    # redis-py 8 gives up on a socket that is silent for 5 s; an idle subscription is.
    host = {"address": redis_url, "socket_timeout": None}
    return {
        # Pub/sub alone would do for the feed, which promises nothing. With this, what a
        # restart of Redis or a short fault of the network would take reaches the page after
        # all, or the page shows a gap. No interval: people watch it.
        "default": {"BACKEND": echo, "CONFIG": {"transport": "redis", "batch_interval": 0}},
        "redis": {
            "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
            "CONFIG": {"hosts": [host]},
        },
    }


DATABASES = databases(os.environ.get("ECHOMQ_DATABASE", ""))
CHANNEL_LAYERS = channel_layers(os.environ.get("ECHOMQ_REDIS_URL", ""))
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

TASKS = {
    "default": {
        "BACKEND": "echomq_app.jobs.backend.EchoMQBackend",
        "QUEUES": ["default", "seismic"],
    }
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "echomq_app",
    "project.seismic",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "project.csp.ContentSecurityPolicyMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]

# Nothing inline, nothing from elsewhere. `connect-src 'self'` covers websockets.
SECURE_CSP: dict[str, list[str]] = {
    "default-src": ["'none'"],
    "script-src": ["'self'"],
    "style-src": ["'self'"],
    "img-src": ["'self'", "data:"],  # the admin's icons in style sheets
    "font-src": ["'self'"],
    "connect-src": ["'self'"],
    "form-action": ["'self'"],
    "base-uri": ["'none'"],
    "frame-ancestors": ["'none'"],
}

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

ROOT_URLCONF = "project.urls"
ASGI_APPLICATION = "project.asgi.application"
WSGI_APPLICATION = "project.wsgi.application"

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in (
        "UserAttributeSimilarityValidator",
        "MinimumLengthValidator",
        "CommonPasswordValidator",
        "NumericPasswordValidator",
    )
]

LANGUAGE_CODE = "en-us"
TIME_ZONE = "UTC"
USE_TZ = True

STATIC_URL = "static/"
STATIC_ROOT = BASE_DIR / "staticfiles"

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": "INFO"},
}

if django.VERSION >= (6, 0):
    # Django's own, which knows nonces; the project's is for 5.2 alone.
    MIDDLEWARE[1] = "django.middleware.csp.ContentSecurityPolicyMiddleware"
