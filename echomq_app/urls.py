"""The app's addresses over plain HTTP: `path("echomq/", include("echomq_app.urls"))`.

`events` is answered by `echomq_app.routing.http`, which finds it by its name here; so this is
the one place that says where it is.
"""

from __future__ import annotations

from django.urls import path

from .live import views

app_name = "echomq"

urlpatterns = [
    path("streams/<str:name>", views.records, name="records"),
    path("streams/<str:name>/events", views.events, name="events"),
    path("token", views.token, name="token"),
]
