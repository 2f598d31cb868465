"""Requests run in a transaction each (ATOMIC_REQUESTS): so they append on commit."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from echomq_app.stream import Stream

from .models import Order
from .tasks import pack


@csrf_exempt
def place(request: HttpRequest) -> HttpResponse:
    order = Order.objects.create(item=request.POST["item"])
    Stream("orders").append_on_commit({"item": order.item}, type="placed", key=str(order.pk))
    pack.enqueue(order.item)
    if request.POST.get("fail"):
        raise RuntimeError("the card was declined")
    return HttpResponse(status=201)


def head(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(Stream("orders").info().write_cursor))
