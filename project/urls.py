"""Addresses of the host project."""

from __future__ import annotations

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("echomq/", include("echomq_app.urls")),
    path("", include("project.seismic.urls")),
]
