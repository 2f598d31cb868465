"""The page, and its JSON: how the job stands, start, cancel, clear.

A demo: whoever reaches the server may use it. A page of your own asks for a login here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.views.decorators.http import require_POST, require_safe

from echomq_app.core.ids import JobId
from echomq_app.exceptions import InvalidPayload, UnknownJob, UnknownStream, WrongBrand
from echomq_app.jobs import control
from echomq_app.models.job import CancelRequest, Job
from echomq_app.stream import Stream

from . import feed
from .quakes import FASTEST, QUAKE, QUEUE, REASON_MAX, SLOWEST, STREAM, TOTAL
from .routing import SOCKET
from .tasks import replay

Answer = tuple[int, dict[str, Any]]
JsonView = Callable[[dict[str, Any]], Answer]


ONE_AT_A_TIME = "the replay"


class BadInput(Exception):
    """The body isn't what the address expects; the message says what it expects."""


@require_safe
def page(request: HttpRequest) -> HttpResponse:
    """Show the page."""
    return render(
        request,
        "seismic/page.html",
        {
            "broker": feed.crosses_processes(),
            "fastest": FASTEST,
            "quake_event": QUAKE,
            "reason_max": REASON_MAX,
            "slowest": SLOWEST,
            "socket": f"/{SOCKET}",
            "total": TOTAL,
            "total_text": f"{TOTAL:,}",
        },
    )


@require_safe
def status(request: HttpRequest) -> JsonResponse:
    """Say how the latest replay stands. `job` is null when there was none."""
    job = _latest_job()
    return JsonResponse({"job": None if job is None else _describe(job)})


def takes_json(view: JsonView) -> Callable[[HttpRequest], JsonResponse]:
    """Make a POST view of a function that takes the JSON object of the body."""

    @require_POST
    @wraps(view)
    def wrapped(request: HttpRequest) -> JsonResponse:
        try:
            code, answer = view(_body(request))
        except (BadInput, WrongBrand, InvalidPayload) as error:
            code, answer = 400, {"error": str(error)}
        except UnknownJob as error:
            code, answer = 404, {"error": str(error)}
        return JsonResponse(answer, status=code)

    return wrapped


@takes_json
def start(body: dict[str, Any]) -> Answer:
    """Start a replay of `speed` earthquakes a second."""
    speed = body.get("speed")
    if not isinstance(speed, int | float) or not SLOWEST <= speed <= FASTEST or speed is True:
        raise BadInput(f"speed is a number from {SLOWEST:g} to {FASTEST:g} (earthquakes a second).")
    # Not looked up before: two who start at once would both find none.
    result = replay.using(unique=ONE_AT_A_TIME).enqueue(speed=speed)
    if result.duplicate:
        return 409, {"error": "A replay is under way. Cancel it first, or let it end."}
    return 201, {"job_id": result.id, "message": f"Replay asked for, {speed:g} a second."}


@takes_json
def cancel(body: dict[str, Any]) -> Answer:
    """Cancel the replay `job_id`, with a `reason`."""
    reason = body.get("reason", "")
    if not isinstance(reason, str) or len(reason) > REASON_MAX:
        raise BadInput(f"reason is a text of at most {REASON_MAX} characters.")
    id = JobId.parse(body.get("job_id"))
    if not Job.objects.filter(pk=id, queue=QUEUE).exists():
        raise UnknownJob(f"There is no replay {id}.")
    answer = control.cancel(id, reason.strip() or None)
    messages = {
        "cancelled": "Cancelled before it began.",
        "requested": "Asked the worker to stop.",
        "finished": "It was over already; nothing has changed.",
    }
    return 200, {"answer": answer, "message": messages[answer]}


@takes_json
def clear(body: dict[str, Any]) -> Answer:
    """Delete the log: the next record begins another life of it, with another epoch."""
    if _is_active(_latest_job()):
        return 409, {"error": "A replay is under way. Cancel it first, then clear the log."}
    with contextlib.suppress(UnknownStream):
        Stream(STREAM).delete()
    return 200, {}


def _body(request: HttpRequest) -> dict[str, Any]:
    if request.content_type != "application/json":
        raise BadInput("Send a JSON object, with Content-Type: application/json.")
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError):
        raise BadInput("The body is no JSON.") from None
    if not isinstance(body, dict):
        raise BadInput("The body is no JSON object.")
    return body


def _latest_job() -> Job | None:
    return Job.objects.filter(queue=QUEUE).order_by("-pk").first()


def _is_active(job: Job | None) -> bool:
    return job is not None and not job.is_finished


def _describe(job: Job) -> dict[str, Any]:
    request = CancelRequest.objects.filter(job=job).first()
    return {
        "id": str(job.pk),
        "state": job.state,
        "attempt": job.attempt,
        "fraction": job.progress,
        "note": job.progress_note,
        "cancel_requested": request is not None,
        "reason": job.cancel_reason or (request.reason if request else ""),
        "result": job.result,
        "error": _last_error(job),
    }


def _last_error(job: Job) -> str:
    if not job.errors:
        return ""
    return f"{job.errors[-1]['class']}: {job.errors[-1]['message']}"[:300]
