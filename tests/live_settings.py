"""Settings of servers whose streams everybody may read, for tests of live pages."""

from __future__ import annotations

import os
from typing import Any

from tests.settings import *  # noqa: F403


def everybody(user: Any, action: str, target: str) -> bool:
    """Let anybody read anything."""
    return True


ECHOMQ = {
    "AUTHORIZE": "tests.live_settings.everybody",
    "POLL_INTERVAL": float(os.environ.get("ECHOMQ_TEST_POLL", "0.25")),
}
