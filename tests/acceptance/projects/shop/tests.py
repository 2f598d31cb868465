"""What a user's own tests look like. Run by the user's runner, not by the app's."""
# ruff: noqa: PT009, PT027  (the style of unittest)

from __future__ import annotations

import threading
import urllib.parse
import urllib.request

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connections, transaction
from django.test import LiveServerTestCase, TestCase, TransactionTestCase

from echomq_app.cancel import CancelToken
from echomq_app.exceptions import InsideTransaction, IsolationError, UnknownStream
from echomq_app.models import Job
from echomq_app.stream import Receipt, Stream
from echomq_app.testing import flush_outbox

from .models import Order

LOG = "log" if "log" in settings.DATABASES else "default"
STRICT = bool(getattr(settings, "ISOLATION", ""))


def items() -> list[str]:
    return [record.data["item"] for record in Stream("orders").replay()]


def transitions() -> list[str]:
    return [record.type for record in Stream("emq.default").replay()]


def relayed() -> list[str]:
    """Return the items, after what a worker or a tail does in a SERIALIZABLE project."""
    Stream("orders").relay()
    return items()


class ViewTests(TestCase):
    """Everything in one transaction that is rolled back."""

    databases = {"default", LOG}

    def setUp(self) -> None:
        if STRICT:
            self.skipTest("a TestCase can't show appends under SERIALIZABLE")

    def test_place(self) -> None:
        self.assertEqual(self.client.post("/place/", {"item": "tea"}).status_code, 201)
        self.client.post("/place/", {"item": "milk"})
        flush_outbox()
        self.assertEqual(items(), ["tea", "milk"])
        self.assertEqual(transitions(), ["enqueued", "enqueued"])
        self.assertEqual(self.client.get("/head/").content, b"2")

    def test_place_again_in_an_empty_log(self) -> None:
        self.client.post("/place/", {"item": "tea"})
        flush_outbox()
        self.assertEqual([record.position for record in Stream("orders").replay()], [0])

    async def test_place_under_asgi(self) -> None:
        response = await self.async_client.post("/place/", {"item": "tea"})
        self.assertEqual(response.status_code, 201)
        await sync_to_async(flush_outbox)()
        self.assertEqual((await Stream("orders").aread()).write_cursor, 1)

    def test_an_exception_leaves_nothing(self) -> None:
        if LOG != "default":
            self.skipTest("two databases have two transactions")
        with self.assertRaises(RuntimeError):
            self.client.post("/place/", {"item": "tea", "fail": "1"})
        flush_outbox()
        self.assertFalse(Order.objects.exists())
        with self.assertRaises(UnknownStream):
            Stream("orders").read()

    def test_verbs(self) -> None:
        stream = Stream("orders")
        receipts = stream.append_many([{"data": {"item": n}} for n in "abc"])
        self.assertEqual(receipts[-1].position, 2)
        with transaction.atomic(using=LOG):
            stream.append({"item": "never"})
            transaction.set_rollback(True, using=LOG)
        stream.trim(max_records=2)
        self.assertEqual(items(), ["b", "c"])
        with self.assertRaises(InsideTransaction):
            next(stream.tail())
        stream.delete()

    def test_callbacks(self) -> None:
        with self.captureOnCommitCallbacks(using=LOG, execute=True) as callbacks:
            Stream("orders").append({"item": "tea"})
        self.assertEqual(len(callbacks), 1)

    async def test_async(self) -> None:
        await Stream("orders").aappend({"item": "tea"})
        self.assertEqual([r.data["item"] async for r in Stream("orders").areplay()], ["tea"])


class ClassDataTests(TestCase):
    databases = {"default", LOG}
    receipt: Receipt

    @classmethod
    def setUpTestData(cls) -> None:
        if not STRICT:
            cls.receipt = Stream("orders").append({"item": "tea"})

    def test_continue(self) -> None:
        if not STRICT:
            self.assertEqual(Stream("orders").append({"item": "milk"}).position, 1)

    def test_continue_again(self) -> None:
        if not STRICT:
            self.assertEqual(Stream("orders").append({"item": "milk"}).position, 1)
            self.assertEqual(len(Stream("orders").read(self.receipt.token).records), 1)


class CommitTests(TransactionTestCase):
    """Real commits; the database is flushed after each."""

    databases = {"default", LOG}

    def test_place(self) -> None:
        self.client.post("/place/", {"item": "tea"})
        self.client.post("/place/", {"item": "milk"})
        self.assertEqual(relayed(), ["tea", "milk"])
        Stream("emq.default").relay()
        self.assertEqual(transitions(), ["enqueued", "enqueued"])
        self.assertEqual(
            [job.arguments["args"] for job in Job.objects.order_by("id")], [["tea"], ["milk"]]
        )

    def test_place_again_in_an_empty_log(self) -> None:
        with self.assertRaises(UnknownStream):
            Stream("orders").read()
        self.client.post("/place/", {"item": "tea"})
        self.assertEqual(relayed(), ["tea"])
        self.assertEqual(Stream("orders").append({"item": "milk"}).position, 1)

    def test_an_exception_leaves_nothing(self) -> None:
        with self.assertRaises(RuntimeError):
            self.client.post("/place/", {"item": "tea", "fail": "1"})
        self.assertFalse(Order.objects.exists())
        if LOG == "default":
            self.assertFalse(Job.objects.exists())
            with self.assertRaises(UnknownStream):
                Stream("orders").read()

    def test_append_inside_a_strict_transaction_says_what_to_do(self) -> None:
        if not STRICT:
            self.skipTest("needs SERIALIZABLE")
        with self.assertRaisesRegex(IsolationError, "append_on_commit"):
            with transaction.atomic(using=LOG):
                Stream("orders").append({"item": "tea"})
        self.assertEqual(Stream("orders").append({"item": "tea"}).position, 0)

    def test_tail_in_a_thread(self) -> None:
        if connections[LOG].vendor == "sqlite":
            self.skipTest("threads share a database in memory badly")
        stop, seen = CancelToken(), []

        def follow() -> None:
            for record in Stream("orders").tail(stop=stop):
                seen.append(record.data["item"])
                stop.cancel()
            connections.close_all()

        thread = threading.Thread(target=follow)
        thread.start()
        self.client.post("/place/", {"item": "tea"})
        thread.join(30)
        self.assertEqual(seen, ["tea"])


class SerializedTests(TransactionTestCase):
    """With what migrations wrote, restored after each flush."""

    databases = {"default", LOG}
    serialized_rollback = True

    def check(self) -> None:
        if "shop" in settings.MIGRATION_MODULES:
            self.skipTest("tested without migrations")
        Stream("setup").relay()
        steps = [record.data["step"] for record in Stream("setup").replay()]
        self.assertEqual(steps, ["first", "second"])
        self.assertEqual(Stream("setup").append({"step": "test"}).position, 2)

    def test_once(self) -> None:
        self.check()

    def test_again(self) -> None:
        self.check()


class LiveTests(LiveServerTestCase):
    databases = {"default", LOG}

    def test_place(self) -> None:
        form = urllib.parse.urlencode({"item": "tea"}).encode()
        address = f"{self.live_server_url}/place/"
        with urllib.request.urlopen(address, form, timeout=30) as answer:  # noqa: S310
            self.assertEqual(answer.status, 201)
        self.assertEqual(relayed(), ["tea"])
