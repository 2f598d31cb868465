"""The log has a database of its own, which holds nothing else."""

from __future__ import annotations

from typing import Any


class LogRouter:
    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "log" if model._meta.app_label == "echomq" else None

    db_for_read = db_for_write

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return (db == "log") == (app_label == "echomq")
