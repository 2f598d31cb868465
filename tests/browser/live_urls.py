"""Pages that follow a stream, under the project's strict policy."""

from __future__ import annotations

from pathlib import Path

from django.http import HttpRequest, HttpResponse
from django.template import engines
from django.urls import path

import project.urls

SCRIPT = Path(__file__).with_name("live_page.js")

HEAD = """{% load echomq static %}<!doctype html><html lang="en"><meta charset="utf-8">
<title>{{ stream }}</title><link rel="icon" href="data:,">
"""
JOURNAL = """<body data-client="{% static 'echomq/echomq.js' %}" data-stream="{{ stream }}"
  data-resume="{% echomq_resume stream %}" data-options="{{ options }}">
<script type="module" src="/live/page.js"></script>
"""
ELEMENT = """{% echomq_script %}
<echomq-stream name="{{ stream }}" resume="{% echomq_resume stream %}" limit="5" {{ options }}>
  <template><li><b data-field="data.text"></b> <i data-field="position"></i></li></template>
  <ul data-records></ul>
</echomq-stream>
"""


def page(request: HttpRequest, kind: str, stream: str) -> HttpResponse:
    """Give a page whose token is of now; its script is yet to come."""
    source = HEAD + (ELEMENT if kind == "element" else JOURNAL)
    context = {"stream": stream, "options": request.GET.get("options", "")}
    return HttpResponse(engines["django"].from_string(source).render(context, request))


def script(request: HttpRequest) -> HttpResponse:
    return HttpResponse(SCRIPT.read_text(), content_type="text/javascript")


urlpatterns = [
    path("live/page.js", script),
    path("live/<str:kind>/<str:stream>/", page),
    *project.urls.urlpatterns,
]
