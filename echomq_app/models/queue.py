"""Queues as operators see them: those that a worker has served, and which of them are paused."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Self

from django.db import models
from django.utils.translation import gettext_lazy as _

from ..core.names import QUEUE_NAME_MAX
from .fields import NameField


class QueueQuerySet(models.QuerySet["Queue"]):
    """Pause and resume, each true once for whoever made the change."""

    def paused(self) -> Self:
        """Keep the queues from which nothing is claimed."""
        return self.filter(paused_at__isnull=False)

    def ensure(self, names: Iterable[str]) -> None:
        """Have a row for each of these queues."""
        self.bulk_create([Queue(name=name) for name in sorted(names)], ignore_conflicts=True)

    def pause(self, name: str, reason: str, at: dt.datetime) -> bool:
        """Pause a queue; False if it is paused already (its first reason stays)."""
        self.ensure([name])
        unpaused = self.filter(pk=name, paused_at=None)
        return bool(unpaused.update(paused_at=at, pause_reason=reason))

    def resume(self, name: str) -> bool:
        """Resume a queue; False if it wasn't paused."""
        paused = self.paused().filter(pk=name)
        return bool(paused.update(paused_at=None, pause_reason=""))


class Queue(models.Model):
    """One queue. A queue without a row isn't paused."""

    name = NameField(max_length=QUEUE_NAME_MAX, primary_key=True)
    paused_at = models.DateTimeField(null=True, blank=True)
    pause_reason = models.TextField(blank=True, default="")

    objects = QueueQuerySet.as_manager()

    class Meta:
        verbose_name = _("queue")
        verbose_name_plural = _("queues")
        ordering = ("name",)

    def __str__(self) -> str:
        return str(self.name)
