"""What all pages have in common: they show, and change nothing.

What an action does, it does through the services that code calls too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import django
from django.contrib import admin
from django.db import router
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.urls import reverse

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:  # Django's class can't be subscripted at run time
    _ModelAdmin = admin.ModelAdmin


def home(model: type[Model]) -> str:
    """Return the database that a model's rows are read from: where they are written.

    A replica may be behind, and the log reads where it writes.
    """
    return router.db_for_write(model)


class ReadOnlyAdmin(_ModelAdmin):
    """Nobody adds, changes or deletes here, a superuser neither; who may view, views."""

    sortable_by = ()
    show_full_result_count = False
    list_per_page = 50
    view_on_site = False

    class Media:
        css = {"all": ("echomq/admin.css",)}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).using(home(self.model))

    def frame(self, request: HttpRequest, title: str) -> dict[str, Any]:
        """Return what a page of our own needs for the admin's frame around it."""
        request.current_app = self.admin_site.name
        return {
            **self.admin_site.each_context(request),
            "title": title,
            "opts": self.opts,
            "media": self.media,
            "breadcrumbs_are_a_list": django.VERSION >= (6, 1),
        }

    def url(self, model: str, page: str, *arguments: object) -> str:
        """Return the address of a page of ours in this admin site."""
        return reverse(
            f"admin:echomq_{model}_{page}", args=arguments, current_app=self.admin_site.name
        )
