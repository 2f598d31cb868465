"""The hub's readers against lists: each record once, in order; or told, and then every later one.

The database's answers come when the machine lets them, in any order, or fail; so a stream is
trimmed, rotated, deleted and made anew at every moment of a read, and of a reader's opening.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from django.db import OperationalError, connection
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from echomq_app.core.records import StreamRecord
from echomq_app.core.tokens import NO_EPOCH, ResumeToken
from echomq_app.exceptions import UnknownStream
from echomq_app.live import life, stream_pages
from echomq_app.live import reader as readers
from echomq_app.live import tail as tails
from echomq_app.live.hub import Batch, Expired, Hub, Reader
from echomq_app.live.threads import DatabaseThreads
from echomq_app.stream import Stream
from tests.integration.test_stream_model import EMPTY

pytestmark = pytest.mark.django_db(transaction=True)

ITEMS = st.lists(
    st.tuples(st.sampled_from("xy"), st.sampled_from(["", "a"]), st.integers(0, 300)),
    min_size=1,
    max_size=12,
)
EXAMPLES = 100
SELDOM = st.sampled_from([False, False, False, True])
BEFORE_STREAM = str(ResumeToken(NO_EPOCH, 0))
WORDS = st.sampled_from([None, "head", "first", "first", "nonsense", 0, 0, 1, 5, 40, BEFORE_STREAM])
FILTERS = st.sampled_from([{}, {}, {"types": ["x"]}, {"key": "a"}, {"types": ["z"]}])


@dataclasses.dataclass(slots=True)
class Era:
    """What a stream held under one epoch."""

    epoch: str
    entries: list[tuple[int, str, str, str]] = dataclasses.field(default_factory=list)
    """Number, type, key, and the tail of the record's id."""
    first: int = 0
    over: bool = False


@dataclasses.dataclass(frozen=True)
class EvenAlone:
    key = "even"

    def __call__(self, record: StreamRecord) -> StreamRecord | None:
        return None if record.data["n"] % 2 else record


class Page:
    """A reader, and what it has to get next: the records of `era` from `cursor` on."""

    def __init__(self, place: int | str | None, only: dict[str, Any], masked: bool) -> None:
        self.place = place
        self.only = only
        self.masked = masked
        self.opening: asyncio.Task[Reader] | None = None
        self.reader: Reader | None = None
        self.era: Era | None = None
        self.cursor = 0
        self.then: tuple[str, int, int] | None = None
        """The epoch, first position and head at the time that it was asked for."""
        self.owed: str | None = None
        """Why the next that it takes has to be a notice."""

    def wants(self, entry: tuple[int, str, str, str]) -> bool:
        number, type, key, _ = entry
        return (
            type in self.only.get("types", [type])
            and key == self.only.get("key", key)
            and not (self.masked and number % 2)
        )


class HubMachine(RuleBasedStateMachine):
    """One stream, some readers, and a database that answers when it is let."""

    places = Bundle("places")
    pages = Bundle("pages")

    def __init__(self) -> None:
        super().__init__()
        self.stream = Stream("model")
        # Of the time without a stream: whoever waits for it finds what comes into being.
        self.eras: dict[str, Era] = {NO_EPOCH: Era(NO_EPOCH, over=True)}
        self.current: Era | None = None
        self.number = 0
        self.deleted = False
        self.here: list[Page] = []
        self.waiting: list[tuple[asyncio.Future[Any], Callable[[], Any]]] = []
        self.loop = asyncio.new_event_loop()
        self.hub = Hub()
        self.patch = pytest.MonkeyPatch()

    @initialize()
    def begin(self) -> None:
        with connection.cursor() as cursor:
            for statement in EMPTY[connection.vendor]:
                cursor.execute(statement)
        self.append([("x", "", 100), ("y", "a", 0)] * 6)

        async def run(
            threads: DatabaseThreads, using: str, call: Callable[[], Any], **more: Any
        ) -> Any:
            answer = self.loop.create_future()
            self.waiting.append((answer, call))
            return await answer

        self.patch.setattr(DatabaseThreads, "run", run)
        # Woken by the machine alone.
        for verb in ("add_sink", "remove_sink"):
            self.patch.setattr(f"echomq_app.live.tail.engine.{verb}", lambda *sink: None)
        for module in (tails, stream_pages):
            self.patch.setattr(module, "full_jitter", lambda *args, **more: 0)
        for module, name, value in (
            (life, "RING_RECORDS", 6),
            (life, "RING_BYTES", 3_000),
            (tails, "PACE", 0),
            (stream_pages, "PAGE_SIZES", (2, 4)),
            (stream_pages, "SMALL_PAGE", 1_200),
            (stream_pages, "LARGE_PAGE", 1_500),
            (readers, "SCAN", 5),
            (readers, "SKIPPED", 3),
        ):
            self.patch.setattr(module, name, value)

    def teardown(self) -> None:
        try:
            self.catch_up()
        finally:
            self.end()

    def end(self) -> None:
        for page in self.here:
            if page.reader is not None:
                page.reader.close()
        tasks = asyncio.all_tasks(self.loop)

        async def cancel() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(cancel())
        self.loop.close()
        self.patch.undo()

    # Writing

    def look(self) -> Era | None:
        """Learn what the stream is now."""
        try:
            epoch = self.stream.info().epoch
        except UnknownStream:
            self.current = None
        else:
            self.current = self.eras.setdefault(epoch, Era(epoch))
        return self.current

    @rule(target=places, items=ITEMS)
    def append(self, items: list[tuple[str, str, int]]) -> Any:
        records = []
        for type, key, size in items:
            self.number += 1
            data = {"n": self.number, "text": "x" * size}
            records.append({"data": data, "type": type, "key": key})
        receipts = self.stream.append_many(records)
        era = self.look()
        assert era is not None
        first = self.number - len(items) + 1
        for number, (type, key, _), receipt in zip(
            range(first, first + len(items)), items, receipts, strict=True
        ):
            assert receipt.position == len(era.entries)
            era.entries.append((number, type, key, receipt.id.tail))
        return multiple(*(receipt.token for receipt in receipts))

    @precondition(lambda self: self.current is not None)
    @rule(keep=st.integers(0, 20))
    def trim(self, keep: int) -> None:
        assert self.current is not None
        self.current.first = self.stream.trim(max_records=keep).first_position

    @precondition(lambda self: self.current is not None)
    @rule(really=SELDOM)
    def rotate_epoch(self, really: bool) -> None:
        if not really:
            return
        before = self.current
        assert before is not None
        epoch = self.stream.rotate_epoch()
        before.over = True
        self.eras[epoch] = Era(epoch, list(before.entries), before.first)
        self.look()

    @precondition(lambda self: self.current is not None)
    @rule(really=SELDOM)
    def delete(self, really: bool) -> None:
        if not really:
            return
        assert self.current is not None
        self.stream.delete()
        self.current.over = True
        self.current, self.deleted = None, True

    # The database

    @rule(polled=st.booleans())
    def wake(self, polled: bool) -> None:
        """Have the tail look: a wake-up came, or the interval of the polls is over."""
        for tail in list(self.hub._tails.values()):
            self.loop.call_soon(tail._check if polled else tail.poke)
        self.turn()

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 9))
    def answer(self, which: int) -> None:
        answer, call = self.waiting.pop(which % len(self.waiting))
        if not answer.done():
            try:
                result = call()
            except Exception as error:
                answer.set_exception(error)
            else:
                answer.set_result(result)
        self.look()
        self.turn()

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 9))
    def fail(self, which: int) -> None:
        answer, _ = self.waiting.pop(which % len(self.waiting))
        if not answer.done():
            answer.set_exception(OperationalError("away"))
        self.turn()

    def turn(self) -> None:
        async def some() -> None:
            for _ in range(12):
                await asyncio.sleep(0)

        self.loop.run_until_complete(some())
        for page in self.here:
            self.see_whether_open(page)
        self.here = [page for page in self.here if page.opening or page.reader]

    # Reading

    @rule(
        target=pages,
        place=st.one_of(WORDS, places),
        only=FILTERS,
        masked=st.booleans(),
        at_once=st.booleans(),
    )
    def open(
        self, place: int | str | None, only: dict[str, Any], masked: bool, at_once: bool
    ) -> Page:
        page = Page(place, only, masked)
        era = self.look()
        if era is not None:
            page.then = (era.epoch, era.first, len(era.entries))
        mask = EvenAlone() if masked else None

        async def opened() -> Reader:
            return await self.hub.open("model", place, wake=bool, mask=mask, **only)

        page.opening = self.loop.create_task(opened())
        self.here.append(page)
        self.turn()
        for _ in range(1_000 if at_once else 0):
            if not self.opens(page):
                break
            if self.waiting:
                self.answer(0)
            self.turn()
        assert not (at_once and self.opens(page))
        return page

    def opens(self, page: Page) -> bool:
        return page.opening is not None

    def see_whether_open(self, page: Page) -> None:
        if page.opening is None or not page.opening.done():
            return
        task, page.opening = page.opening, None
        if isinstance(task.exception(), UnknownStream):
            assert self.deleted
            return
        page.reader = task.result()
        opened = page.reader.opened
        page.era = era = self.eras[opened.epoch]
        page.cursor = opened.cursor
        assert opened.first <= opened.cursor <= opened.head <= len(era.entries)
        is_token = isinstance(page.place, str) and ":" in page.place
        # What it is told is no older than its question; but a token that fits what was seen last
        # is good, until the change that has come meanwhile is told, as to all who are there.
        if page.then is not None and not (is_token and opened.recovered):
            epoch, first, head = page.then
            assert era.epoch == epoch or self.eras[epoch].over
            assert era.epoch != epoch or (first <= opened.first and head <= opened.head)
        if not opened.recovered:
            page.owed = self.why(page.place, opened.epoch, opened.first, opened.head)
            assert page.owed, "nothing was wrong with that place"
        elif isinstance(page.place, int):
            assert opened.cursor == page.place
        elif page.place == "first":
            assert opened.cursor == opened.first
        elif page.place in (None, "head"):
            assert opened.cursor <= len(era.entries)
        elif page.place == BEFORE_STREAM:
            assert opened.cursor == 0
        else:
            epoch, cursor, _ = page.place.split(":")
            assert (opened.epoch, opened.cursor) == (epoch, int(cursor))

    def why(self, place: Any, epoch: str, first: int, head: int) -> str | None:
        """Say what is wrong with a place, if anything is."""
        if place == "nonsense":
            return "malformed"
        if isinstance(place, str) and ":" in place:
            of, place = place.split(":")[:2]
            if of not in (epoch, NO_EPOCH):
                return "epoch"
        cursor = int(place)
        return "ahead" if cursor > head else "trimmed" if cursor < first else None

    @rule(
        page=pages,
        most=st.integers(1, 5),
        most_bytes=st.integers(1, 900),
        answers=st.lists(st.integers(0, 9), max_size=4),
    )
    def take(self, page: Page, most: int, most_bytes: int, answers: list[int]) -> None:
        """Take, and again after each answer."""
        for which in (None, *answers):
            if which is not None and self.waiting:
                self.answer(which)
            if page.reader is not None:
                self.taken(page, most, most_bytes)

    def taken(self, page: Page, most: int, most_bytes: int) -> bool:
        """Take, and compare; tell whether something came."""
        assert page.reader is not None and page.era is not None
        try:
            came = self.loop.run_until_complete(self.take_in_loop(page.reader, most, most_bytes))
        except UnknownStream:
            assert page.era.over and self.deleted
            page.reader.close()
            page.reader = None
            return True
        if isinstance(came, Batch):
            if page.era.epoch == NO_EPOCH:
                page.era = self.eras[came.resume.split(":")[0]]
            self.compare(page, page.era, came)
            assert len(came.records) <= most
            assert len(came.records) == 1 or sum(map(len, came.records)) <= most_bytes
        elif came is not None:
            self.justify(page, page.era, came)
        return came is not None

    async def take_in_loop(self, reader: Reader, most: int, size: int) -> Batch | Expired | None:
        return reader.take(most, size)

    def compare(self, page: Page, era: Era, came: Batch) -> None:
        assert page.owed is None, "records, instead of the notice that they don't all come"
        assert page.cursor <= came.cursor <= len(era.entries) and came.cursor <= came.head
        passed = range(page.cursor, came.cursor)
        wanted = [(at, era.entries[at][0]) for at in passed if page.wants(era.entries[at])]
        records = [msgspec.json.decode(raw) for raw in came.records]
        assert [(record["position"], record["data"]["n"]) for record in records] == wanted
        tail = era.entries[came.cursor - 1][3]
        tails = (tail,) if records and wanted[-1][0] == came.cursor - 1 else (tail, "")
        assert came.resume in [f"{era.epoch}:{came.cursor}:{tail}" for tail in tails]
        page.cursor = came.cursor

    def justify(self, page: Page, era: Era, came: Expired) -> None:
        if page.owed is not None:
            assert came.reason == page.owed
            page.owed = None
        elif came.reason == "trimmed":
            if era.epoch == NO_EPOCH:
                era = self.eras[came.epoch]
            assert came.requested == page.cursor < era.first
        else:
            assert came.reason == "epoch" and era.over and came.requested == page.cursor
        page.era = self.eras[came.epoch]
        page.cursor = came.cursor
        assert came.first <= came.cursor == came.head <= len(page.era.entries)

    @rule(page=consumes(pages))
    def close(self, page: Page) -> None:
        if page.opening is not None:
            page.opening.cancel()
        if page.reader is not None:
            page.reader.close()
        if page in self.here:
            self.here.remove(page)
        self.turn()
        if not self.here:
            assert not self.hub._tails and not self.hub._pages._kept

    def catch_up(self) -> None:
        """Let the database answer: everybody has all that is theirs, soon."""
        for turn in range(400):
            self.wake(polled=bool(turn % 2))
            while self.waiting:
                self.answer(0)
            came = [self.taken(page, 5, 900) for page in self.here if page.reader]
            if not any(came) and not self.waiting and not any(map(self.lacks, self.here)):
                return
        raise AssertionError([vars(page) for page in self.here if self.lacks(page)])

    def lacks(self, page: Page) -> bool:
        if page.reader is None:
            return page.opening is not None
        era = page.era
        assert era is not None
        if era.epoch == NO_EPOCH:
            return self.current is not None and any(map(page.wants, self.current.entries))
        return era is not self.current or any(map(page.wants, era.entries[page.cursor :]))


@pytest.fixture
def no_polling(settings: Any) -> None:
    """Let no clock decide what happens: an example has to do the same each time."""
    settings.ECHOMQ = {"POLL_INTERVAL": 3_600, "FILTER_WINDOW": 4}


@pytest.mark.usefixtures("no_polling")
def test_readers_of_a_stream_that_changes_at_every_moment() -> None:
    run_state_machine_as_test(
        HubMachine,
        settings=settings(
            max_examples=max(EXAMPLES, settings().max_examples),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


@pytest.mark.usefixtures("no_polling")
def test_who_asks_during_a_look_hears_when_a_page_finds_the_stream_gone() -> None:
    """The page's read ends the tail in the middle of its own read, on behalf of an opener."""
    machine = HubMachine()
    machine.begin()
    page: Any = machine.open("first", {}, masked=False, at_once=True)
    machine.taken(page, 1, 1)
    machine.delete(really=True)
    machine.open(None, {}, masked=False, at_once=False)
    machine.teardown()
