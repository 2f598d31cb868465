"""The page, and what it asks for over plain HTTP."""

from __future__ import annotations

from django.urls import path

from . import views

app_name = "seismic"

urlpatterns = [
    path("", views.page, name="page"),
    path("seismic/status", views.status, name="status"),
    path("seismic/start", views.start, name="start"),
    path("seismic/cancel", views.cancel, name="cancel"),
    path("seismic/clear", views.clear, name="clear"),
]
