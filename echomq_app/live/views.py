"""Plain requests: a page of records in JSON, and a token for a page's socket."""

from __future__ import annotations

from django.db import InterfaceError, OperationalError, transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_protect
from django.views.decorators.http import require_GET, require_POST, require_safe

from ..conf import current
from ..exceptions import BadToken, CursorExpired, CursorInvalid, UnknownStream
from . import access
from .answers import JSON, Refused, bad_token, forbidden, refused, unavailable, wanted
from .masks import mask_in_view
from .record_page import expired, record_page

NOT_MOUNTED = """\
Server-sent events are not served by Django's views: a view holds a thread and a database
connection for each of its streams. They need an ASGI server (uvicorn, daphne), and in asgi.py:

    from echomq_app.routing import http

    application = http(get_asgi_application())

or, with Channels, ProtocolTypeRouter({"http": http(get_asgi_application()), "websocket": ...}).
"""


@transaction.non_atomic_requests  # it writes nothing; on SQLite it would take the write lock
@never_cache
@require_safe
def records(request: HttpRequest, name: str) -> HttpResponse:
    """Answer with a page of records from `cursor` on, as JSON."""
    try:
        try:
            body, status, headers = _records(request, name), 200, {}
        except (access.Undecided, OperationalError, InterfaceError) as error:
            raise unavailable(error) from None
    except Refused as refusal:
        body, status, headers = refusal.body, refusal.status, refusal.headers
    return HttpResponse(body, status=status, content_type=JSON, headers=headers)


def _records(request: HttpRequest, name: str) -> bytes:
    question = wanted(name, request.GET, ("cursor",), ("limit",))
    try:
        identity = access.identity_of(request)
    except BadToken as error:
        raise bad_token(error) from None
    if not access.allowed_in_view(identity, "stream.read", name):
        raise forbidden(identity, name)
    try:
        try:
            return record_page(name, question, mask_in_view(identity, name))
        except CursorExpired as error:
            raise Refused(410, expired(name, "trimmed", error.requested)) from None
        except CursorInvalid as error:
            raise Refused(409, expired(name, error.reason, question.place)) from None
    except UnknownStream as error:
        raise refused(404, "unknown_stream", str(error)) from None


@transaction.non_atomic_requests
@never_cache
@require_POST
@csrf_protect
def token(request: HttpRequest) -> JsonResponse:
    """Give a token to whoever is logged in, to open a socket with where no cookie goes."""
    user = getattr(request, "user", None)
    if user is None or not user.is_authenticated or not user.is_active:
        return JsonResponse(
            {"type": "error", "code": "unauthenticated", "message": "Log in first."}, status=403
        )
    return JsonResponse({"token": access.make_token(user), "expires_in": current().TOKEN_MAX_AGE})


@require_GET
def events(request: HttpRequest, name: str) -> HttpResponse:
    """Say why no stream of events comes. Where they come, `routing.http` answers, not this."""
    return HttpResponse(NOT_MOUNTED, status=501, content_type="text/plain; charset=utf-8")
