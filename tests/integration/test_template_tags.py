"""The template tags, as a page's template uses them."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.staticfiles import finders
from django.template import Context, RequestContext, Template
from django.test import RequestFactory, override_settings

from echomq_app.live.resume import resume_token
from echomq_app.models import Stream as StreamRow
from echomq_app.stream import Stream


def rendered(template: str, context: Context | None = None) -> str:
    return Template("{% load echomq %}" + template).render(context or Context())


def test_script_is_a_module_from_the_static_files() -> None:
    with override_settings(STATIC_URL="https://cdn.example/s/"):
        tag = rendered("{% echomq_script %}")
    address = "https://cdn.example/s/echomq/echomq-stream.js"
    assert tag == f'<script type="module" src="{address}"></script>'
    assert finders.find("echomq/echomq-stream.js")


def test_script_with_the_nonce_of_a_context_processor() -> None:
    tag = rendered("{% echomq_script %}", Context({"csp_nonce": 'abc"<'}))
    assert 'nonce="abc&quot;&lt;">' in tag


def test_script_with_the_nonce_of_a_request() -> None:
    request: Any = RequestFactory().get("/")
    request.csp_nonce = "abc"
    assert 'nonce="abc"' in rendered("{% echomq_script %}", RequestContext(request))


def test_script_generates_djangos_own_nonce() -> None:
    csp = pytest.importorskip("django.utils.csp", reason="Django 6.0 and newer")
    nonce = csp.LazyNonce()
    assert f'nonce="{nonce}"' in rendered("{% echomq_script %}", Context({"csp_nonce": nonce}))
    fresh = csp.LazyNonce()
    rendered("{% echomq_script %}", Context({"csp_nonce": fresh}))
    assert fresh  # it was made, so the header will have it


@pytest.mark.django_db
def test_resume_is_the_head_as_it_is_rendered() -> None:
    Stream("orders").append(1)
    token = rendered('{% echomq_resume "orders" %}')
    assert token == Stream("orders").info().token
    Stream("orders").append_many([{"data": 2}, {"data": 3}])
    assert [record.data for record in Stream("orders").read(token).records] == [2, 3]


@pytest.mark.django_db
def test_resume_before_the_stream_exists_creates_none() -> None:
    token = rendered("{% echomq_resume name %}", Context({"name": "new"}))
    assert not StreamRow.objects.exists()
    Stream("new").append(1)
    assert [record.data for record in Stream("new").read(token).records] == [1]
    assert resume_token("new") != token


@pytest.mark.django_db(databases=["default", "other"])
def test_resume_of_another_database() -> None:
    Stream("orders", using="other").append(1)
    token = rendered('{% echomq_resume "orders" using="other" %}')
    assert Stream("orders", using="other").info().token == token
