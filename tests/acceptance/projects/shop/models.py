from __future__ import annotations

from django.db import models


class Order(models.Model):
    """What the log's records are about."""

    item = models.CharField(max_length=50)

    objects: models.Manager[Order] = models.Manager()

    def __str__(self) -> str:
        return self.item
