"""The Content-Security-Policy header on Django 5.2, which has no middleware for it."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.http import HttpRequest, HttpResponseBase
from django.utils.deprecation import MiddlewareMixin


class ContentSecurityPolicyMiddleware(MiddlewareMixin):
    """Send `settings.SECURE_CSP` (Django 6.0's setting), unless the view has set a policy."""

    get_response: Callable[[HttpRequest], HttpResponseBase]

    def process_response(
        self, request: HttpRequest, response: HttpResponseBase
    ) -> HttpResponseBase:
        policy = "; ".join(
            " ".join([name, *sources]) for name, sources in settings.SECURE_CSP.items()
        )
        response.headers.setdefault("Content-Security-Policy", policy)
        return response
