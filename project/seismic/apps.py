"""The seismic page: a real week of earthquakes through the feed and the log."""

from __future__ import annotations

from django.apps import AppConfig


class SeismicConfig(AppConfig):
    name = "project.seismic"
    verbose_name = "Seismic feed"
