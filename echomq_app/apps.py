"""Where Django meets the app: signals of migrations, checks."""

from __future__ import annotations

from django.apps import AppConfig
from django.db.models.signals import post_migrate, pre_migrate


class EchoMQConfig(AppConfig):
    """`INSTALLED_APPS = [..., "echomq_app"]`."""

    name = "echomq_app"
    label = "echomq"
    verbose_name = "EchoMQ"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks  # noqa: F401  (registers them)
        from .layers.consumers import install_default_handlers
        from .models import sql

        install_default_handlers()

        pre_migrate.connect(sql.before_migrate, sender=self, dispatch_uid="echomq.sql")
        post_migrate.connect(sql.after_migrate, sender=self, dispatch_uid="echomq.sql")
