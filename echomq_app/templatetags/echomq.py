"""Template tags of live pages: `{% load echomq %}`."""

from __future__ import annotations

from django import template
from django.templatetags.static import static
from django.utils.html import format_html
from django.utils.safestring import SafeString

from ..live.resume import resume_token

register = template.Library()

SCRIPT = "echomq/echomq-stream.js"


@register.simple_tag(takes_context=True)
def echomq_script(context: template.Context) -> SafeString:
    """Load the JavaScript client and its element, `<echomq-stream>`.

    With a nonce where the project's Content-Security-Policy has one: Django's context
    processor `csp`, or django-csp's `request.csp_nonce`.
    """
    nonce = context.get("csp_nonce")
    if nonce is None:
        nonce = getattr(context.get("request"), "csp_nonce", None)
    if nonce is None:
        return format_html('<script type="module" src="{}"></script>', static(SCRIPT))
    return format_html('<script type="module" src="{}" nonce="{}"></script>', static(SCRIPT), nonce)


@register.simple_tag
def echomq_resume(name: str, using: str | None = None) -> str:
    """Give the token of the stream's head as this page is rendered; creates the stream."""
    return resume_token(name, using=using)
