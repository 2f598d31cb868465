"""The week of earthquakes, and what the page calls things."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STREAM = "earthquakes"
"""The durable log."""
QUEUE = "seismic"
"""The queue of the replay, and so the name of the lossy feed."""
QUAKE = "quake"
"""The feed's event for one earthquake, beside the job's own events."""

SLOWEST, FASTEST = 1.0, 2000.0
"""Earthquakes a second."""
REASON_MAX = 500
"""Characters of a reason to cancel."""

TOTAL = 1707

_FILE = Path(__file__).with_name("data") / "earthquakes.jsonl"


def week() -> Iterator[dict[str, Any]]:
    """Yield the events in the order of their time, oldest first."""
    with _FILE.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)
