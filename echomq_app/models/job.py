"""Jobs and the requests to cancel them.

A job's row says who may write it: `state = running`, `worker` and `fence`. The fence
grows at every claim and is never restored, so the late write of a worker that lost its
lease finds no row. `attempt` is another number, and only there to limit retries: counted
when the handler begins (then `begun_fence` is the claim's fence), and given back when a
worker hands a job back.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterable
from typing import Any, Self

from django.db import models
from django.db.models import Exists, OuterRef, Q
from django.utils.translation import gettext_lazy as _

from ..core.names import QUEUE_NAME_MAX
from .fields import BrandedIdField, NameField
from .worker import NAME_MAX, Worker

TASK_PATH_MAX = 500
NOTE_MAX = 255
UNIQUE_KEY_MAX = 255
GROUP_KEY_MAX = TASK_PATH_MAX + 10
KIND_MAX = 40


class JobState(models.TextChoices):
    """Where a job stands. The last three are final, unless somebody retries it."""

    READY = "ready", _("Ready")
    SCHEDULED = "scheduled", _("Scheduled")
    RUNNING = "running", _("Running")
    COMPLETED = "completed", _("Completed")
    FAILED = "failed", _("Failed")
    CANCELLED = "cancelled", _("Cancelled")


WAITING = (JobState.READY, JobState.SCHEDULED)
ACTIVE = (*WAITING, JobState.RUNNING)
FINISHED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class JobQuerySet(models.QuerySet["Job"]):
    """What is asked about jobs. Every write that matters is in `jobs/`, with its record."""

    def waiting(self) -> Self:
        """Keep jobs that no worker has: they are cancelled directly."""
        return self.filter(state__in=WAITING)

    def finished(self) -> Self:
        """Keep jobs that are completed, failed or cancelled."""
        return self.filter(state__in=FINISHED)

    def running(self) -> Self:
        """Keep jobs that a worker has claimed."""
        return self.filter(state=JobState.RUNNING)

    def due(self, at: dt.datetime) -> Self:
        """Keep scheduled jobs whose time has come."""
        return self.filter(state=JobState.SCHEDULED, run_after__lte=at)

    def in_queues(self, queues: Collection[str]) -> Self:
        """Keep jobs of these queues."""
        return self.filter(queue__in=queues)

    def abandoned(self) -> Self:
        """Keep running jobs whose worker's lease was declared lost, or whose row is gone."""
        held = Worker.objects.filter(pk=OuterRef("worker_id"), lost_at=None, stopped_at=None)
        return self.running().filter(~Exists(held))

    def cancel_requested(self) -> Self:
        """Keep jobs that somebody asked to cancel."""
        return self.filter(Exists(CancelRequest.objects.filter(job=OuterRef("pk"))))

    def skip_locked(self) -> Self:
        """Lock the rows that nobody else holds, where the database has row locks."""
        return self.select_for_update(skip_locked=True, no_key=True, of=("self",))


class Job(models.Model):
    """One call of a task, from enqueue to its end."""

    id = BrandedIdField(brand="JOB", primary_key=True, editable=False)
    queue = NameField(max_length=QUEUE_NAME_MAX)
    task_path = models.CharField(max_length=TASK_PATH_MAX)
    arguments = models.JSONField(help_text=_('{"args": [...], "kwargs": {...}}'))
    priority = models.SmallIntegerField(default=0)
    run_after = models.DateTimeField(
        help_text=_("Not before this time; then, within a priority, in this order.")
    )
    state = models.CharField(max_length=10, choices=JobState.choices, default=JobState.READY)
    attempt = models.IntegerField(default=0)
    max_attempts = models.IntegerField(default=1)
    options = models.JSONField(default=dict, blank=True)
    fence = models.BigIntegerField(default=0)
    begun_fence = models.BigIntegerField(
        default=0,
        db_default=0,
        help_text=_("The fence of the last claim whose handler began: its attempt is counted."),
    )
    # No constraint: checking it would lock the worker's row at every claim, and the
    # heartbeat writes that row.
    worker = models.ForeignKey(
        Worker,
        null=True,
        blank=True,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        db_index=False,
        related_name="jobs",
    )
    worker_name = models.CharField(max_length=NAME_MAX, blank=True, default="")
    enqueued_at = models.DateTimeField()
    started_at = models.DateTimeField(null=True, blank=True)
    attempted_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    progress = models.FloatField(null=True, blank=True)
    progress_note = models.CharField(max_length=NOTE_MAX, blank=True, default="")
    result = models.JSONField(null=True, blank=True)
    errors = models.JSONField(default=list, blank=True)
    cancel_reason = models.TextField(blank=True, default="")
    # Those that follow have a default in the database too: the code before them inserts rows.
    cancel_kind = models.CharField(max_length=KIND_MAX, blank=True, default="", db_default="")
    unique_key = NameField(
        max_length=UNIQUE_KEY_MAX,
        blank=True,
        default="",
        db_default="",
        help_text=_("While a job of this key waits or runs, there is no second one."),
    )
    group_key = NameField(
        max_length=GROUP_KEY_MAX,
        blank=True,
        default="",
        db_default="",
        help_text=_("Jobs of a group share a limit of how many run at once."),
    )
    group_limit = models.IntegerField(null=True, blank=True)
    parked = models.BooleanField(
        default=False,
        db_default=False,
        help_text=_("Ready, but its group is full: no claim looks at it until there is room."),
    )
    retention = models.FloatField(
        null=True, blank=True, help_text=_("Seconds that the row stays when the job has ended.")
    )

    objects = JobQuerySet.as_manager()

    class Meta:
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        # Each holds the rows of one state only, so a million finished jobs cost nothing.
        indexes = (
            models.Index(
                fields=["queue", "-priority", "run_after", "id"],
                condition=Q(state="ready", parked=False),
                name="echomq_job_ready",
            ),
            models.Index(
                fields=["queue", "run_after"],
                condition=Q(state="scheduled"),
                name="echomq_job_scheduled",
            ),
            models.Index(
                fields=["worker"], condition=Q(state="running"), name="echomq_job_running"
            ),
            models.Index(
                fields=["queue", "parked", "group_key", "-priority", "run_after", "id"],
                condition=Q(state="ready") & ~Q(group_key=""),
                name="echomq_job_group_ready",
            ),
            models.Index(
                fields=["group_key"],
                condition=Q(state="running") & ~Q(group_key=""),
                name="echomq_job_group_running",
            ),
            # Few values of retention, each with its jobs in the order in which they go.
            models.Index(
                fields=["retention", "finished_at"],
                condition=Q(retention__isnull=False, finished_at__isnull=False),
                name="echomq_job_retention",
            ),
            # What an operator looks for among a million that went well.
            models.Index(
                fields=["id"], condition=Q(state__in=("failed", "cancelled")), name="echomq_job_bad"
            ),
        )
        constraints = (
            models.UniqueConstraint(
                fields=["unique_key"],
                condition=~Q(unique_key="") & Q(state__in=("ready", "scheduled", "running")),
                name="echomq_job_unique",
            ),
        )

    def __str__(self) -> str:
        return str(self.pk)

    @property
    def has_begun(self) -> bool:
        """Whether the handler of the last claim began; else the job waits in its worker."""
        return self.begun_fence == self.fence

    @property
    def is_finished(self) -> bool:
        """Whether nothing more happens to it, unless somebody retries it."""
        return self.state in FINISHED


class CancelRequestQuerySet(models.QuerySet["CancelRequest"]):
    """The memory of who asked to cancel what."""

    def for_jobs(self, ids: Iterable[Any]) -> dict[Any, CancelRequest]:
        """Return the requests for these jobs, by job id."""
        return {request.job_id: request for request in self.filter(job__in=list(ids))}

    def for_worker(self, worker_id: int) -> dict[Any, CancelRequest]:
        """Return the requests for all that a worker runs, by job id."""
        ours = self.filter(job__worker=worker_id, job__state=JobState.RUNNING)
        return {request.job_id: request for request in ours}


class CancelRequest(models.Model):
    """Somebody asked a running job to stop. The first reason stays.

    A row of its own, so that asking never waits for the job's row. It goes when the job
    is finished; the reason stays on the job.
    """

    job = models.OneToOneField(
        Job,
        primary_key=True,
        on_delete=models.DO_NOTHING,
        db_constraint=False,
        related_name="cancel_request",
    )
    reason = models.TextField(blank=True, default="")
    kind = models.CharField(max_length=KIND_MAX, default="user")
    requested_at = models.DateTimeField()

    objects = CancelRequestQuerySet.as_manager()

    class Meta:
        verbose_name = _("cancel request")
        verbose_name_plural = _("cancel requests")

    def __str__(self) -> str:
        return str(self.job_id)
