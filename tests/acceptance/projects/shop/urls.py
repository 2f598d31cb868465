from __future__ import annotations

from django.urls import path

from . import views

urlpatterns = [path("place/", views.place), path("head/", views.head)]
