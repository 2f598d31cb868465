"""Queues: which of them are paused, and the pausing."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.messages import SUCCESS, WARNING
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _t
from django.utils.translation import gettext_lazy as _

from ..jobs import control
from ..models import Queue
from . import rendering
from .changelist import NamedAdmin


@admin.register(Queue)
class QueueAdmin(NamedAdmin):
    """Lists the queues that workers have served, by name."""

    list_display = ("name", "condition", "since", "reason")
    fields = list_display
    readonly_fields = fields
    actions = ("pause_selected", "resume_selected")

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Tell whether the user may pause and resume: Django's "can change queue"."""
        return bool(request.user.has_perm("echomq.change_queue"))

    @admin.action(permissions=["operate"], description=_("Pause selected queues"))
    def pause_selected(self, request: HttpRequest, queryset: QuerySet[Queue]) -> None:
        for queue in queryset:
            changed = control.pause(queue.name, f"paused by {request.user.get_username()}")
            self._tell(request, queue, changed, _t("paused"))

    @admin.action(permissions=["operate"], description=_("Resume selected queues"))
    def resume_selected(self, request: HttpRequest, queryset: QuerySet[Queue]) -> None:
        for queue in queryset:
            self._tell(request, queue, control.resume(queue.name), _t("resumed"))

    def _tell(self, request: HttpRequest, queue: Queue, changed: bool, what: str) -> None:
        values = {"queue": queue.name, "what": what}
        if changed:
            self.log_change(request, queue, what)
            self.message_user(request, _t("Queue %(queue)s was %(what)s.") % values, SUCCESS)
        else:
            text = _t("Queue %(queue)s was %(what)s already.") % values
            self.message_user(request, text, WARNING)

    @admin.display(description=_("state"))
    def condition(self, queue: Queue) -> SafeString:
        if queue.paused_at is None:
            return rendering.badge("alive", _t("Open"))
        return rendering.badge("stopped", _t("Paused"))

    @admin.display(description=_("paused at"))
    def since(self, queue: Queue) -> SafeString | str:
        return rendering.moment(queue.paused_at)

    @admin.display(description=_("reason"))
    def reason(self, queue: Queue) -> str:
        return queue.pause_reason or rendering.EMPTY
