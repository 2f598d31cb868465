"""Channel layers for tests, and a broker that hangs."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.test import override_settings

from echomq_app import engine

CORE = "channels_redis.core.RedisChannelLayer"
PUBSUB = "channels_redis.pubsub.RedisPubSubChannelLayer"
IN_MEMORY = "channels.layers.InMemoryChannelLayer"
ECHO = "echomq_app.layers.EchoChannelLayer"
ROOT = Path(__file__).resolve().parent.parent

Layers = dict[str, dict[str, Any]]


def channel_layers(backend: str, url: str = "", **config: Any) -> Layers:
    """Return CHANNEL_LAYERS with this backend; a URL makes it a Redis one."""
    if url:
        config["hosts"] = [url]
    return {"default": {"BACKEND": backend, "CONFIG": config}}


def echo_layers(transport: str, url: str, **config: Any) -> Layers:
    """Return CHANNEL_LAYERS with an EchoChannelLayer over this backend on Redis."""
    return {
        "default": {"BACKEND": ECHO, "CONFIG": {"transport": "redis", **config}},
        "redis": {"BACKEND": transport, "CONFIG": {"hosts": [url]}},
    }


@contextlib.contextmanager
def use_layers(layers: Layers, **settings: Any) -> Iterator[None]:
    """Run the block with these CHANNEL_LAYERS and these settings of ECHOMQ."""
    with override_settings(CHANNEL_LAYERS=layers, ECHOMQ=settings):
        try:
            yield
        finally:
            assert engine.stop()


@contextlib.contextmanager
def hung_server() -> Iterator[str]:
    """Give the URL of a Redis that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield f"redis://127.0.0.1:{server.getsockname()[1]}/0"


PROLOGUE = """
import json, os, sys, threading, time
from django.conf import settings
settings.configure(**json.loads(sys.argv[1]))
from echomq_app import engine, events
from echomq_app.core.ids import new_job_id
"""


def run_program(
    program: str, layers: Layers, *arguments: str, **settings: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with these layers and settings of ECHOMQ."""
    configuration = json.dumps({"CHANNEL_LAYERS": layers, "ECHOMQ": settings})
    return subprocess.run(
        # Python 3.12 and later warn of every fork in a process with threads.
        [
            sys.executable,
            "-W",
            "ignore:This process",
            "-c",
            PROLOGUE + program,
            configuration,
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
