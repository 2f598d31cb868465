"""A claimed job as text, for the process that runs its handler."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json

from ..core.ids import JobId
from .claims import ClaimedJob


def pack(claimed: ClaimedJob) -> str:
    """Return the job as JSON text.

    By Python's `json`: what the database has may hold numbers that only that can carry.
    """
    values = {field.name: getattr(claimed, field.name) for field in dataclasses.fields(claimed)}
    times = {name: at.isoformat() for name, at in values.items() if isinstance(at, dt.datetime)}
    rest = {name: value for name, value in values.items() if name not in times}
    return json.dumps([{**rest, "id": str(claimed.id)}, times], separators=(",", ":"))


def unpack(text: str) -> ClaimedJob:
    """Return the job of such a text."""
    values, times = json.loads(text)
    times = {name: dt.datetime.fromisoformat(at) for name, at in times.items()}
    return ClaimedJob(**{**values, **times, "id": JobId.parse(values["id"])})
