"""Pages by key: how far one may look is bounded, whatever the size of the table.

No OFFSET and no COUNT. A page begins below or above a key (`?below=`, `?above=`), which
stays where it is when rows are added. What no index answers is looked for among so many
rows only (`window`); then the page says so, and its link goes on from there.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Max, Min, Q, QuerySet, TextField, UUIDField
from django.db.models.functions import Cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyset:
    """The order of a list: by one unique, indexed column."""

    column: str
    descending: bool
    parse: Callable[[str], Any]
    """From the text in the address; raises ValueError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysetPage:
    """Some rows in the list's order, and the keys where the pages around it begin."""

    rows: list[Any]
    above: Any = None
    """The page before holds what stands above this key; `None`: there is nothing."""
    below: Any = None
    searched: int = 0
    """So many rows were looked at without filling the page; 0 when it wasn't bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysetQuery:
    """What to list: rows that an index finds, and a condition that none answers."""

    rows: QuerySet[Any]
    keyset: Keyset
    condition: Q = field(default_factory=Q)
    least: Any = None
    """Keys below this one aren't listed; `None`: all are."""
    size: int = 50
    window: int = 10_000

    def page(self, *, below: Any = None, above: Any = None) -> KeysetPage:
        """Read the page below or above a key, or the first one."""
        if above is None:
            found, beyond, searched = self._walk(below, down=True)
            first = found[0] if found else beyond
            return KeysetPage(
                rows=found,
                above=None if below is None else self._key(first),
                below=self._key(beyond),
                searched=searched,
            )
        found, beyond, searched = self._walk(above, down=False)
        if beyond is None:
            return self.page()  # the top: a whole page, not what is left of one
        return KeysetPage(
            rows=found[::-1],
            above=self._key(beyond),
            below=self._key(found[0] if found else beyond),
            searched=searched,
        )

    def _walk(self, start: Any, *, down: bool) -> tuple[list[Any], Any, int]:
        """Read one page in one direction: rows, the last one looked at if there are more."""
        column, forward = self.keyset.column, down != self.keyset.descending
        order = column if forward else f"-{column}"
        ahead = self.rows
        if start is not None:
            ahead = ahead.filter(**{f"{column}__{'gt' if forward else 'lt'}": start})
        listed = ahead if self.least is None else ahead.filter(**{f"{column}__gte": self.least})
        edge = (
            self._edge(listed.order_by(order)[: self.window], forward) if self.condition else None
        )
        within = listed.filter(self.condition)
        if edge is not None and forward:
            within = within.filter(**{f"{column}__lte": edge})
        elif edge is not None:
            # Instead of `least`: of two lower bounds SQLite searches for the first that it sees.
            within = ahead.filter(self.condition, **{f"{column}__gte": edge})
        found = list(within.order_by(order)[: self.size + 1])
        if len(found) > self.size:
            return found[:-1], found[-2], 0
        if edge is None:
            return found, None, 0
        # In order: for any row of many, PostgreSQL takes the table from its front.
        beyond = listed.filter(**{f"{column}__{'gt' if forward else 'lt'}": edge}).order_by(order)
        more = bool(beyond.values_list(column)[:1])
        return found, edge if more else None, self.window if more else 0

    def _edge(self, window: QuerySet[Any], forward: bool) -> Any:
        """Return the last key of the window; `None`: it is empty."""
        column, last = self.keyset.column, Max if forward else Min
        field = window.model._meta.get_field(column)
        if not isinstance(field, UUIDField):
            return window.aggregate(edge=last(column))["edge"]
        # Before PostgreSQL 18 there is no min(uuid). Its text sorts like its bytes.
        text = window.aggregate(edge=last(Cast(column, TextField())))["edge"]
        return None if text is None else field.to_python(uuid.UUID(text))

    def _key(self, row: Any) -> Any:
        return getattr(row, self.keyset.column, row)
