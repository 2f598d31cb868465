"""Settings of the servers that send events in tests: they ask about permissions often."""

from __future__ import annotations

from tests.settings import *  # noqa: F403

ECHOMQ = {"AUTHORIZE_INTERVAL": 3}
