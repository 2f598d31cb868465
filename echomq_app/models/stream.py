"""The log's tables: a stream, its records, and what waits to be appended at commit.

There is no counter column: a counter's dead versions pile up behind any snapshot
that is held open elsewhere, and appends slow down without end. The write cursor
(count of all records ever written) is derived: `max(last position + 1,
first_position)`, always looked up at or above `first_position`.
"""

from __future__ import annotations

import secrets
from typing import Any

from django.db import DatabaseError, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from ..core.names import IDEMPOTENCY_KEY_MAX, KEY_MAX, STREAM_NAME_MAX, TYPE_MAX
from .fields import BrandedIdField, JSONValueField, NameField
from .times import now, stored


def new_epoch() -> str:
    """Mint the name of one life of a stream: 64 random bits."""
    return secrets.token_hex(8)


class Stream(models.Model):
    """One log. Its row is the lock that appends of the stream queue at."""

    name = NameField(max_length=STREAM_NAME_MAX, unique=True)
    epoch = models.CharField(
        max_length=16,
        default=new_epoch,
        help_text=_("Names this life of the log; tokens of another life are refused."),
    )
    first_position = models.BigIntegerField(
        default=0, help_text=_("Oldest retained position; everything below was trimmed.")
    )
    expired_from = models.BigIntegerField(
        null=True,
        blank=True,
        editable=False,
        help_text=_("Oldest trimmed position that may not be deleted yet; empty: there is none."),
    )
    max_records = models.BigIntegerField(
        null=True, blank=True, help_text=_("Retention: keep the newest so many records.")
    )
    max_age = models.DurationField(
        null=True, blank=True, help_text=_("Retention: keep records this long.")
    )
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        verbose_name = _("stream")
        verbose_name_plural = _("streams")
        ordering = ("name",)
        # For retention, which must not look at all the streams that have nothing to do with it.
        indexes = (
            models.Index(
                fields=["name"],
                condition=Q(max_records__isnull=False) | Q(max_age__isnull=False),
                name="echomq_stream_policy",
            ),
            models.Index(
                fields=["name"],
                condition=Q(expired_from__isnull=False),
                name="echomq_stream_expired",
            ),
        )

    def __str__(self) -> str:
        return str(self.name)


class Record(models.Model):
    """One entry of a stream: written once, never changed (the database refuses it)."""

    id = BrandedIdField(brand="EVT", primary_key=True, editable=False)
    # Checking the foreign key cost a quarter of the rate of batches. The lock on the
    # stream's row already holds it in place while records are written.
    stream = models.ForeignKey(
        Stream,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="records",
    )
    position = models.BigIntegerField()
    type = models.CharField(max_length=TYPE_MAX, blank=True, default="")
    key = models.CharField(max_length=KEY_MAX, blank=True, default="")
    data = JSONValueField()
    headers = JSONValueField(default=dict, blank=True)
    idempotency_key = models.CharField(max_length=IDEMPOTENCY_KEY_MAX, blank=True, default="")
    recorded_at = models.DateTimeField()

    class Meta:
        verbose_name = _("record")
        verbose_name_plural = _("records")
        # A fixture that is loaded twice: the database passes over the second update.
        select_on_save = True
        constraints = (
            models.UniqueConstraint(
                fields=["stream", "position"], name="echomq_record_stream_position"
            ),
            models.UniqueConstraint(
                fields=["stream", "idempotency_key"],
                condition=~Q(idempotency_key=""),
                name="echomq_record_idempotency",
            ),
        )
        indexes = (
            models.Index(
                fields=["stream", "key", "position"],
                condition=~Q(key=""),
                name="echomq_record_key",
            ),
        )

    def __str__(self) -> str:
        return str(self.id)


class Outbox(models.Model):
    """A record that waits for its transaction to commit, or for the relay.

    `xact` is the transaction that wrote the row, where that transaction's commit
    moves it into its stream; rows of `emq.*` have none, the relay moves them.

    `keys`: JOB ids, separated by commas. What happened to many jobs at once is one row here:
    it becomes a record for each, in this order, with the id as `key` and as `id` in its data.
    """

    stream = NameField(max_length=STREAM_NAME_MAX)
    record = models.JSONField()
    # NULL, and not '': rows that SQL writes don't name it.
    keys = models.TextField(null=True)  # noqa: DJ001
    xact = models.BigIntegerField(null=True)

    class Meta:
        verbose_name = _("outbox row")
        verbose_name_plural = _("outbox")
        indexes = (
            models.Index(fields=["stream", "id"], name="echomq_outbox_stream"),
            models.Index(
                fields=["xact", "stream", "id"],
                condition=Q(xact__isnull=False),
                name="echomq_outbox_xact",
            ),
        )

    def __str__(self) -> str:
        return f"{self.stream} #{self.pk}"


def insert_stream(cursor: Any, connection: BaseDatabaseWrapper, name: str) -> bool:
    """Create a stream's row if it isn't there; tell whether it was so.

    A write in any case: SQLite takes its lock.
    """
    cursor.execute(
        "INSERT INTO echomq_stream (name, epoch, first_position, created_at)"
        " VALUES (%s, %s, 0, %s) ON CONFLICT (name) DO NOTHING",
        (name, new_epoch(), stored(now(), connection)),
    )
    if cursor.rowcount < 1:
        return False
    # Only after a restore of one table without the other: these would be its history.
    cursor.execute(
        "SELECT s.id FROM echomq_stream s WHERE s.name = %s"
        " AND (SELECT r.position FROM echomq_record r WHERE r.stream_id = s.id"
        " ORDER BY r.position LIMIT 1) IS NOT NULL",
        (name,),
    )
    lost = cursor.fetchone()
    if lost is not None:
        raise DatabaseError(
            f"stream {name} can't be made: its number {lost[0]} has records of a lost stream. "
            "Restore the rows of echomq_stream too, or delete those records."
        )
    return True
