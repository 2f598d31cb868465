"""A change list that pages by key and filters by a form of its own.

Django's list counts every row, twice, and reaches a page with OFFSET. This one asks its
`KeysetAdmin` what to list, and knows no look-ups in the address but those of the form.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib.admin import ShowFacets
from django.contrib.admin.views.main import ChangeList
from django.contrib.messages import ERROR
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from .keyset import Keyset, KeysetPage, KeysetQuery
from .readonly import ReadOnlyAdmin


class KeysetChangeList(ChangeList):
    """One page of a `KeysetAdmin`."""

    model_admin: KeysetAdmin
    page: KeysetPage

    def get_queryset(self, request: HttpRequest, *args: Any) -> QuerySet[Any]:
        self.filter_specs: list[Any] = []
        self.has_filters = self.has_active_filters = False
        self.form = self.model_admin.filter_form(request.GET)
        self.query_of_page = self.model_admin.keyset_query(request, self.form)
        return self.query_of_page.rows.filter(self.query_of_page.condition)

    def get_results(self, request: HttpRequest) -> None:
        self.page = self._page(request)
        self.result_list = self.page.rows
        # What Django's own templates ask for; nothing was counted.
        self.result_count = len(self.page.rows)
        self.full_result_count = None
        self.show_full_result_count = False
        self.show_admin_actions = bool(self.page.rows)
        self.can_show_all = self.multi_page = False
        self.paginator = Paginator(self.page.rows, max(self.result_count, 1))

    @property
    def above_url(self) -> str | None:
        """Where the page before this one is."""
        return self._url(above=self.page.above)

    @property
    def below_url(self) -> str | None:
        """Where the page after this one is."""
        return self._url(below=self.page.below)

    @property
    def first_url(self) -> str:
        """Where the list begins, with the filters that are set."""
        return self._url() or "?"

    def _page(self, request: HttpRequest) -> KeysetPage:
        query = self.query_of_page
        places: dict[str, Any] = {}
        for name in ("below", "above"):
            if request.GET.get(name):
                try:
                    places[name] = query.keyset.parse(request.GET[name])
                except (ValueError, ValidationError):
                    text = _("This page's address is damaged: the list begins at its start.")
                    self.model_admin.message_user(request, text, ERROR)
        return query.page(**places)

    def _url(self, **places: Any) -> str | None:
        if any(key is None for key in places.values()):
            return None
        parameters = {name: [str(value)] for name, value in places.items()}
        return self.get_query_string(parameters, remove=["below", "above", "go"])


class FilterForm(forms.Form):
    """The filters of a list; what isn't filled in doesn't filter."""

    def __init__(self, data: Any) -> None:
        super().__init__(data, label_suffix="", auto_id="filter_%s")
        self.is_valid()


class KeysetAdmin(ReadOnlyAdmin):
    """Lists by key. A subclass says which rows, in which order."""

    filter_form: ClassVar[type[FilterForm]]
    # Not named change_list.html: Django takes that for every model of the app.
    change_list_template = "admin/echomq/keyset_list.html"
    show_facets = ShowFacets.NEVER
    labels = (_("Newer"), _("Older"), _("Newest"))

    def keyset_query(self, request: HttpRequest, form: Any) -> KeysetQuery:
        """Say what to list for this request, given its filters."""
        raise NotImplementedError

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return KeysetChangeList

    def go_to(self, request: HttpRequest, form: Any) -> str | None:
        """Return the address that the form's `go` field asks for, `None` if it asks nothing."""
        return None

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        if request.GET.get("go") and self.has_view_permission(request):
            address = self.go_to(request, self.filter_form(request.GET))
            if address is not None:
                return HttpResponseRedirect(address)
        title = {"title": capfirst(self.opts.verbose_name_plural)}
        return super().changelist_view(request, {**title, **(extra_context or {})})


class NameFilterForm(FilterForm):
    """Which rows: those whose names begin so."""

    name = forms.CharField(label=_("Name begins with"), required=False)


class NamedAdmin(KeysetAdmin):
    """Lists rows by name, for tables of some hundreds of rows."""

    filter_form = NameFilterForm
    labels = (_("Before"), _("After"), _("First"))
    by_name = Keyset(column="name", descending=False, parse=forms.CharField(strip=False).clean)

    def keyset_query(self, request: HttpRequest, form: Any) -> KeysetQuery:
        rows = self.get_queryset(request)
        if form.is_valid():
            rows = rows.filter(name__startswith=form.cleaned_data["name"])
        else:
            rows = rows.none()
        return KeysetQuery(rows=rows, keyset=self.by_name)
