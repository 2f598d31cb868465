"""Columns that Django doesn't have: branded ids, and names that sort by bytes."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ValidationError
from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

from ..core.ids import BrandedId, EventId, JobId
from ..exceptions import WrongBrand

if TYPE_CHECKING:
    _UUIDField = models.UUIDField[Any, Any]
    _CharField = models.CharField[Any, Any]
    _JSONField = models.JSONField[Any, Any]
else:  # subscripting Django's fields at run time would need a patch of Django
    _UUIDField = models.UUIDField
    _CharField = models.CharField
    _JSONField = models.JSONField

BRANDS: dict[str, type[BrandedId]] = {kind.brand: kind for kind in (EventId, JobId)}


class BrandedIdField(_UUIDField):
    """A UUID column (native on PostgreSQL) whose values know what they name."""

    def __init__(self, *, brand: str, **kwargs: Any) -> None:
        self.brand = brand
        self.kind = BRANDS[brand]
        super().__init__(**kwargs)

    def deconstruct(self) -> tuple[str, str, Any, Any]:
        name, path, args, kwargs = super().deconstruct()
        return name, path, args, {**kwargs, "brand": self.brand}

    def from_db_value(self, value: Any, *args: object) -> BrandedId | None:
        if value is None:
            return None
        return self.kind.from_uuid(value if isinstance(value, uuid.UUID) else uuid.UUID(value))

    def to_python(self, value: Any) -> BrandedId | None:
        if value is None or isinstance(value, self.kind):
            return value
        if isinstance(value, uuid.UUID) and not isinstance(value, BrandedId):
            return self.kind.from_uuid(value)
        try:
            return self.kind.parse(value)
        except WrongBrand as error:
            raise ValidationError(str(error), code="invalid") from error

    def get_db_prep_value(
        self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False
    ) -> Any:
        value = self.to_python(value)
        if value is None:
            return None
        plain = uuid.UUID(int=value.int)
        return plain if connection.features.has_native_uuid_field else plain.hex

    def value_to_string(self, obj: models.Model) -> str:
        return str(self.value_from_object(obj))


class NameField(_CharField):
    """A CharField that compares and sorts by bytes on every database.

    Streams are locked in name order: two sessions with different collations would
    lock in different orders and deadlock. SQLite compares by bytes as it is.
    """

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        parameters = super().db_parameters(connection)
        if connection.vendor == "postgresql":
            parameters["collation"] = "C"
        return parameters


class UndecodableJSON(str):
    """The text of a JSON value that Python can't decode. Only SQL can have written it."""

    __slots__ = ()


class JSONValueField(_JSONField):
    """A JSONField in which `None` is JSON's null: data may be that, and is never absent.

    What can't be decoded is its text, so that a page can show it.
    """

    def from_db_value(self, value: Any, *args: Any) -> Any:
        try:
            return super().from_db_value(value, *args)
        except (RecursionError, ValueError):
            return UndecodableJSON(value)

    def get_db_prep_save(self, value: Any, connection: BaseDatabaseWrapper) -> Any:
        if value is None:
            return connection.ops.adapt_json_value(None, self.encoder)
        return super().get_db_prep_save(value, connection)
