"""Whose turn it is to do what one process has to do for all of them now and then."""

from __future__ import annotations

import datetime as dt
from typing import Any

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from .fields import NameField
from .times import as_django, database_now


class TurnQuerySet(models.QuerySet["MaintenanceTurn"]):
    """Taking turns."""

    def take(self, name: str, interval: dt.timedelta) -> str | None:
        """Take the turn if it is due; return where the last one came to, `None` if it isn't due.

        The next one is due after `interval`, also when this process is killed meanwhile.
        """
        at = as_django(database_now(self.db))
        # One that is due much later was set by a clock that was ahead.
        due = self.filter(Q(due_at__lte=at) | Q(due_at__gt=at + 2 * interval), pk=name)
        next_at = at + interval
        found = due.first()  # without the lock for writing: mostly it isn't due
        if found is None:
            if not self.filter(pk=name).exists():
                self.bulk_create([self.model(name=name, due_at=at)], ignore_conflicts=True)
                return self.take(name, interval)
            return None
        mine = due.filter(due_at=found.due_at).update(due_at=next_at)
        return found.place if mine else None

    def end(self, name: str, place: str, *, again: bool) -> None:
        """Write down where it came to. `again`: the next turn is due at once."""
        changes: dict[str, Any] = {"place": place}
        if again:
            changes["due_at"] = as_django(database_now(self.db))
        self.filter(pk=name).update(**changes)


class MaintenanceTurn(models.Model):
    """One kind of work. Whoever moves `due_at` does it; nothing is held while it is done."""

    name = NameField(max_length=40, primary_key=True)
    due_at = models.DateTimeField()
    place = models.TextField(blank=True, default="")

    objects = TurnQuerySet.as_manager()

    class Meta:
        verbose_name = _("maintenance turn")
        verbose_name_plural = _("maintenance turns")

    def __str__(self) -> str:
        return str(self.name)
