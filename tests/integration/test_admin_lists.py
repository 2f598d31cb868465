"""Every list of the admin: its last row is reached, and only an empty list is called empty."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from django.apps import AppConfig, apps
from django.contrib import admin
from django.contrib.admin.utils import quote
from django.db import models
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from django.utils.html import escape

from echomq_app.core.ids import BrandedId
from echomq_app.models.fields import BrandedIdField

pytestmark = pytest.mark.django_db

APP = apps.get_app_config("echomq")
LISTED = [model for model in admin.site._registry if model._meta.app_config is APP]
NOTE = 'class="echomq-note"'
NEXT = re.compile(r'href="(\?[^"]*)"[^>]*rel="next"')


assert LISTED
every_list = pytest.mark.parametrize("model", LISTED, ids=lambda model: model._meta.model_name)


def test_no_template_is_taken_by_every_list_of_the_app() -> None:
    """Django looks for `admin/<app>/<name>` for each model, before its own `admin/<name>`."""
    djangos = {path.name for path in _templates(apps.get_app_config("admin"), "admin")}
    assert "change_list.html" in djangos
    ours = {path.name for path in _templates(APP, f"admin/{APP.label}")}
    assert ours and not ours & djangos


@every_list
def test_a_full_list_leads_to_its_last_row(model: type[models.Model], admin_client: Client) -> None:
    size = admin.site._registry[model].list_per_page
    keys = {row.pk for row in filled(model, 2 * size + 5)}
    address = reverse(f"admin:echomq_{model._meta.model_name}_changelist")
    change = re.escape(address) + r"([^/\"]+)/change/"
    seen: set[str] = set()
    query: str | None = ""
    while query is not None:
        page = admin_client.get(address + query).content.decode()
        shown = set(re.findall(change, page))
        assert shown and not shown & seen, "a page repeats rows, or has none"
        assert NOTE not in page, "a list with rows is called empty"
        seen |= shown
        following = NEXT.search(page)
        query = following[1].replace("&amp;", "&") if following else None
    assert {unquote(key) for key in seen} == {quote(str(key)) for key in keys}


@every_list
def test_an_empty_list_is_called_empty(model: type[models.Model], admin_client: Client) -> None:
    page = admin_client.get(reverse(f"admin:echomq_{model._meta.model_name}_changelist"))
    name = escape(str(model._meta.verbose_name_plural))
    assert f"No {name} here." in page.content.decode()


def _templates(app: AppConfig, folder: str) -> Iterator[Path]:
    return Path(app.path, "templates", folder).glob("*.html")


def filled(model: type[models.Model], count: int) -> list[models.Model]:
    """Write rows with a value in each column that needs one, whatever the model is."""
    rows = [model(**_values(model, n)) for n in range(1, count + 1)]
    return model._default_manager.bulk_create(rows)


def _values(model: type[models.Model], n: int) -> dict[str, Any]:
    fields = model._meta.concrete_fields
    return {field.attname: _value(field, n) for field in fields if not _is_optional(field)}


def _is_optional(field: Any) -> bool:
    return field.null or field.has_default() or isinstance(field, models.AutoField)


def _value(field: Any, n: int) -> Any:
    if isinstance(field, BrandedIdField):
        kind: type[BrandedId] = field.kind
        return kind.from_int((7 << 76) | (2 << 62) | n)
    if isinstance(field, models.IntegerField | models.ForeignKey):
        return n
    if isinstance(field, models.DateTimeField):
        return timezone.now()
    if isinstance(field, models.JSONField):
        return []
    return f"{field.name}-{n:04}"
