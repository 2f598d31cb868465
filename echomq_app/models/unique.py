"""For how long a key is taken: jobs of which there is one in so many seconds.

A job that is unique while it waits or runs needs no row here: the index of `Job` says so,
and lets go of the key in the very moment in which the job ends.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from django.db import models
from django.utils.translation import gettext_lazy as _

from .each import for_each
from .fields import BrandedIdField, NameField
from .job import UNIQUE_KEY_MAX


class UniqueWindowQuerySet(models.QuerySet["UniqueWindow"]):
    """What is asked about windows. They are written where jobs are enqueued."""

    def prune(self, before: dt.datetime, limit: int) -> int:
        """Forget up to `limit` windows that ended before a time; return how many."""
        over = self.filter(until__lt=before).order_by("until").values_list("pk", flat=True)
        keys = list(over[:limit])
        gone = 0

        def forget(some: Sequence[str]) -> None:
            nonlocal gone
            # The condition stands here too: one of them may have been taken again.
            gone += self.filter(pk__in=some, until__lt=before).delete()[0]

        for_each(self.db, keys, forget, doing="prune", together=max(1, len(keys)))
        return gone


class UniqueWindow(models.Model):
    """A key, the job that has it, and until when."""

    key = NameField(max_length=UNIQUE_KEY_MAX, primary_key=True)
    job_id = BrandedIdField(brand="JOB")
    until = models.DateTimeField(db_index=True)

    objects = UniqueWindowQuerySet.as_manager()

    class Meta:
        verbose_name = _("unique window")
        verbose_name_plural = _("unique windows")

    def __str__(self) -> str:
        return str(self.key)
