"""The log's verbs, for sync code. What users import is `stream.py`, which adds the async twins."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from django.db import router

from . import engine, following
from .cancel import CancelToken
from .conf import current
from .core.names import check_stream_name, is_reserved, stream_wake_group
from .core.records import (
    NewRecord,
    Page,
    Receipt,
    StreamInfo,
    StreamRecord,
    TrimResult,
    as_record,
    check_filter,
    encode_record,
    token_of,
)
from .core.tokens import TOKEN_BEFORE_STREAM, requested_cursor, verify
from .exceptions import InvalidArgument, InvalidName, UnknownStream
from .following import Cursor
from .models import Record, appending, paging, retention, trimming
from .models.relaying import Relay
from .models.stream import Stream as StreamRow
from .models.stream import new_epoch
from .models.transactions import after_commit, refuse_transaction, written

MAX_LIMIT = 10_000
REPLAY_PAGE = 1_000
PAGE_BEFORE_STREAM = Page(
    records=[],
    cursor=0,
    token=str(TOKEN_BEFORE_STREAM),
    first_position=0,
    write_cursor=0,
    epoch=TOKEN_BEFORE_STREAM.epoch,
)
"""What a reader that waits for a stream finds until it exists."""


class Log:
    """One log, by name. Cheap to make: nothing is read before a verb is called.

    `using` is a database alias; by default the router's choice for writing, for reads
    too.
    """

    def __init__(self, name: str, *, using: str | None = None) -> None:
        self.name = check_stream_name(name)
        self._using = using

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, using={self.using!r})"

    @property
    def using(self) -> str:
        """The database: asked of the routers each time, whose answer may change."""
        return self._using or router.db_for_write(Record)

    # Writing

    def append(
        self,
        data: Any,
        *,
        type: str = "",
        key: str = "",
        headers: Mapping[str, Any] | None = None,
        idempotency_key: str = "",
        expected_cursor: int | None = None,
    ) -> Receipt:
        """Append one record, in the caller's transaction if there is one.

        Outside a transaction it is durable when this returns. Inside, other appenders of
        this stream wait until the transaction ends, and a rollback takes the record back
        and its position too. A known `idempotency_key` gives the first receipt again with
        `duplicate=True`; that is decided before `expected_cursor`, so a retry can't
        conflict with itself. Raises `WrongExpectedCursor`, `InvalidPayload`,
        `IsolationError` (under REPEATABLE READ and SERIALIZABLE) or `DatabaseLocked`.
        """
        record = NewRecord(
            data=data, type=type, key=key, headers=headers, idempotency_key=idempotency_key
        )
        return self.append_many([record], expected_cursor=expected_cursor)[0]

    def append_many(
        self,
        records: Sequence[NewRecord | Mapping[str, Any]],
        *,
        expected_cursor: int | None = None,
    ) -> list[Receipt]:
        """Append records at consecutive positions, all or none; see `append`."""
        encoded = self._encode(records)
        if expected_cursor is not None and not trimming.is_count(expected_cursor):
            raise InvalidArgument(f"expected_cursor is a count from 0, not {expected_cursor!r}.")
        receipts = appending.append(self.using, self.name, encoded, expected_cursor)
        if encoded:
            self._wake()
        return receipts

    def append_on_commit(
        self,
        data: Any,
        *,
        type: str = "",
        key: str = "",
        headers: Mapping[str, Any] | None = None,
        idempotency_key: str = "",
    ) -> None:
        """Append when the caller's transaction commits, in the same commit.

        The record is there if and only if the transaction is. The stream's lock is held
        for the commit alone, so nobody waits for a long transaction. Several records of
        one transaction keep their order. A known `idempotency_key` is skipped. Works
        under REPEATABLE READ and SERIALIZABLE, where a worker or a tail moves the record
        into the stream right after the commit. On SQLite it is `append`.
        """
        record = NewRecord(
            data=data, type=type, key=key, headers=headers, idempotency_key=idempotency_key
        )
        self.append_many_on_commit([record])

    def append_many_on_commit(self, records: Sequence[NewRecord | Mapping[str, Any]]) -> None:
        """Append several records when the transaction commits; see `append_on_commit`."""
        encoded = self._encode(records)
        if encoded:
            appending.append_on_commit(self.using, self.name, encoded, current().LOCK_TIMEOUT)
            self._wake()

    # Reading

    def read(
        self,
        cursor: Cursor = None,
        *,
        limit: int = 100,
        types: Collection[str] | None = None,
        key: str | None = None,
    ) -> Page:
        """Read a page from `cursor`: an int, a resume token, or `None` for the oldest retained.

        At most `limit` (1 to 10,000) records; with `types` or `key`, only those that match.
        Types are looked for in a bounded number of positions: `page.cursor` moves past what
        was skipped. Raises `UnknownStream`, `CursorExpired`, `CursorInvalid`, or (for the next
        record, when SQL wrote what Python can't read) `UndecodableRecord`. An explicit
        read from another database than the one written to (a replica) may be behind: there
        a cursor above its head is an empty page, not an error.
        """
        return self._page(cursor, limit=limit, types=types, key=key)[0]

    def replay(
        self,
        cursor: Cursor = None,
        *,
        types: Collection[str] | None = None,
        key: str | None = None,
    ) -> Iterator[StreamRecord]:
        """Iterate from `cursor` to the write cursor as it is at the start.

        In pages, so memory is bounded. Raises `CursorExpired` when a trim overtakes it.
        """
        page = self.read(cursor, limit=REPLAY_PAGE, types=types, key=key)
        end = page.write_cursor
        while True:
            for record in page.records:
                if record.position >= end:
                    return
                yield record
            if page.cursor >= end:
                return
            page = self.read(page.token, limit=REPLAY_PAGE, types=types, key=key)

    def tail(
        self,
        cursor: Cursor = None,
        *,
        stop: CancelToken | None = None,
        types: Collection[str] | None = None,
        key: str | None = None,
    ) -> Iterator[StreamRecord]:
        """Iterate from `cursor` on, for ever, waiting for records.

        A reader from the beginning (`None` or 0) may begin before the stream exists, and waits
        for its first record; reading never creates a stream. Ends when `stop` is cancelled. A
        wake-up from the channel layer makes it quick, polling (`POLL_INTERVAL`) makes it sure.
        Raises `InsideTransaction` inside `atomic()`, and what `read` raises: `UnknownStream` when
        the stream is deleted.
        """
        for page in self.tail_pages(cursor, stop=stop, types=types, key=key):
            yield from page.records

    def tail_pages(
        self,
        cursor: Cursor = None,
        *,
        stop: CancelToken | None = None,
        limit: int = 1_000,
        types: Collection[str] | None = None,
        key: str | None = None,
    ) -> Iterator[Page]:
        """Iterate like `tail`, by page: whenever the cursor moved, also past filtered records."""
        follower = self._follower(cursor, limit=limit, types=types, key=key)
        yield from following.pages(self.name, follower, stop)

    def cursor_at(self, at: dt.datetime) -> int:
        """Find the first cursor whose record was recorded at or after `at` (aware)."""
        trimming.check_aware(at)
        return trimming.cursor_at(self.using, self.name, at)

    def window(self, t0: dt.datetime, t1: dt.datetime) -> Iterator[StreamRecord]:
        """Iterate the records with `t0 <= recorded_at < t1` (aware times)."""
        trimming.check_aware(t1)
        for record in self.replay(self.cursor_at(t0)):
            if record.recorded_at >= t1:
                return
            yield record

    def info(self) -> StreamInfo:
        """Return what the stream holds now, with the token of the head; or `UnknownStream`."""
        return paging.read_info(self.using, self.name)

    # Keeping

    def trim(
        self,
        *,
        max_records: int | None = None,
        max_age: dt.timedelta | None = None,
        before: int | dt.datetime | None = None,
        dry_run: bool = False,
    ) -> TrimResult:
        """Remove the oldest records: what any of the given limits no longer retains.

        With no limit given, the retention policy in force decides. Readers below the new
        oldest position are told `CursorExpired` from the first commit on.
        """
        if max_records is None and max_age is None and before is None:
            max_records, max_age = retention.policy(self._row())
        while True:  # once; again if the stream is deleted and made anew in between
            info = self.info()
            target = trimming.target(
                self.using, info, max_records=max_records, max_age=max_age, before=before
            )
            if dry_run:
                break
            if trimming.move_first_position(self.using, self.name, target, epoch=info.epoch):
                trimming.delete_below(self.using, self.name)
                break
        return TrimResult(
            stream=self.name,
            first_position=target,
            trimmed=target - info.first_position,
            dry_run=dry_run,
        )

    def set_retention(
        self, *, max_records: int | None = None, max_age: dt.timedelta | None = None
    ) -> None:
        """Set this stream's own retention policy; workers and `echomq_stream trim` apply it."""
        if max_records is not None:
            trimming.check_count(max_records)
        if max_age is not None:
            trimming.check_age(max_age)
        appending.ensure(self.using, self.name)
        StreamRow.objects.using(self.using).filter(name=self.name).update(
            max_records=max_records, max_age=max_age
        )

    def rotate_epoch(self) -> str:
        """Begin another life of the log and return its epoch: every token handed out is invalid.

        For after a restored backup, when readers may hold positions that now mean other
        records.
        """
        epoch = new_epoch()
        rows = StreamRow.objects.using(self.using).filter(name=self.name)
        if not rows.update(epoch=epoch):
            raise UnknownStream(self.name)
        self._wake()
        return epoch

    def delete(self) -> None:
        """Delete every record and the stream. Waiting readers get `UnknownStream`."""
        trimming.delete_stream(self.using, self.name)
        self._wake()

    def relay(self, limit: int = 1_000) -> int | None:
        """Move committed records from the outbox into the stream; return how many.

        At most `limit`, or what one row holds: jobs that were enqueued together share rows.
        `None`: somebody else holds the stream's lock, call again. Tails and workers do this;
        call it by hand where neither runs.
        """
        refuse_transaction(self.using, "relay", "Call it after the commit.")
        moved = Relay(self.using, self.name).move(limit)
        if moved:
            self._wake()
        return moved

    # Parts

    def _encode(self, records: Sequence[NewRecord | Mapping[str, Any]]) -> list[bytes]:
        if is_reserved(self.name):
            raise InvalidName(
                f"Only the app itself writes {self.name!r}: names that start with 'emq.' or end "
                "with '.dead' are reserved. Choose another name."
            )
        limit = current().MAX_RECORD_BYTES
        return [encode_record(as_record(record), limit=limit) for record in records]

    def _wake(self) -> None:
        after_commit(self.using, partial(engine.notify, stream_wake_group(self.name)))

    def _row(self) -> StreamRow:
        row = StreamRow.objects.using(self.using).filter(name=self.name).first()
        if row is None:
            raise UnknownStream(self.name)
        return row

    def _follower(self, cursor: Cursor, **filters: Any) -> following.Follower:
        """Start a reader that goes on for ever.

        Only a reader from the beginning waits for a stream that doesn't exist: an empty stream
        has no other place, and what was deleted must not come back as if nothing had happened.
        """
        refuse_transaction(self.using, "tail", "Call it after the commit, or use read().")
        start, token, well_formed = requested_cursor(cursor)
        from_beginning = token is None or token.precedes_stream
        may_wait = well_formed and not start and from_beginning

        def read(at: Cursor, with_pending: bool) -> tuple[Page, bool]:
            nonlocal may_wait
            try:
                page, pending = self._page(at, with_pending=with_pending, **filters)
            except UnknownStream:
                if not may_wait:
                    raise
                return PAGE_BEFORE_STREAM, with_pending  # the relay looks whether anything waits
            may_wait = False
            return page, pending

        read(cursor, False)
        return following.Follower(read, self._relay_if_writable, cursor)

    def _relay_if_writable(self) -> int | None:
        moved: list[int | None] = []
        written(lambda: moved.append(self.relay()))
        return moved[0] if moved else None

    def _page(
        self,
        cursor: Cursor,
        *,
        limit: int,
        types: Collection[str] | None,
        key: str | None,
        with_pending: bool = False,
    ) -> tuple[Page, bool]:
        """Return a page, and (if asked) whether the outbox holds rows for this stream."""
        if not trimming.is_count(limit) or not 1 <= limit <= MAX_LIMIT:
            raise InvalidArgument(f"limit is 1 to {MAX_LIMIT:,}, not {limit!r}.")
        if isinstance(types, str):
            raise InvalidArgument(f"types is a list of types, not the text {types!r}.")
        check_filter(types, key)
        start, token, _ = requested_cursor(cursor)
        snapshot = paging.read_page(
            self.using,
            self.name,
            start,
            limit=limit,
            types=types,
            key=key,
            window=max(current().FILTER_WINDOW, limit),
            with_pending=with_pending,
        )
        place = snapshot.place
        may_be_ahead = self._using is not None and self._using != router.db_for_write(Record)
        error = verify(place, cursor, may_be_ahead=may_be_ahead)
        if error is not None:
            raise error
        if snapshot.undecodable is not None and not snapshot.records:
            raise snapshot.undecodable
        end_tail = snapshot.end_tail
        if token is not None and token.cursor == snapshot.end_cursor:
            end_tail = end_tail or token.tail  # of a record that isn't here: not yet, or trimmed
        page = Page(
            records=snapshot.records,
            cursor=snapshot.end_cursor,
            token=token_of(place.epoch, snapshot.end_cursor, end_tail),
            first_position=place.first_position,
            write_cursor=place.write_cursor,
            epoch=place.epoch,
        )
        return page, snapshot.pending
