"""Every error that this app raises on purpose, in one tree.

EchoMQError
├── InvalidName            a stream, queue, type or key that can't be one
├── InvalidPayload         data that JSON or the database can't hold
│   └── InvalidResult      recorded for a job whose handler returned such data
├── InvalidArgument        a limit, a time or an option out of its range
├── WrongBrand             an id of another kind (JOB where EVT is due)
├── CursorError            a reader's place in a stream is no longer one
│   ├── CursorExpired      trimmed away: records between it and now are gone
│   └── CursorInvalid      never was one: malformed, ahead, epoch, diverged
├── UndecodableRecord      a stored record that Python can't read; can be skipped
├── WrongExpectedCursor    optimistic append lost the race
├── UnknownStream          read of a stream that was never written
├── TransactionError       the surrounding transaction forbids the call
│   ├── IsolationError     append inside REPEATABLE READ or SERIALIZABLE
│   └── InsideTransaction  a call that has to see commits, inside atomic()
├── DatabaseLocked         SQLite gave the write lock to somebody else
├── UnknownJob             no job of that id
├── UnknownTask            a job's path that leads to no task
├── EngineStopped          background work asked of a process that is ending
├── BadToken               a page's token that stands for nobody (any more)
├── WorkerError            a worker that can't start or go on
├── WorkerLost             recorded for a job whose worker stopped renewing its lease
├── ProcessLost            recorded for a job whose handler's process ended
└── JobCancelled           raised by a handler that honours its token
"""

from __future__ import annotations

from typing import Any


class EchoMQError(Exception):
    """Base of all errors of this app. They can be pickled: test runners and pools do."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (type(self), self.args), self.__dict__


def _unpickle(kind: type[EchoMQError], args: tuple[Any, ...]) -> EchoMQError:
    """Make an error without its constructor, whose arguments have names."""
    return kind.__new__(kind, *args)


class InvalidName(EchoMQError, ValueError):
    """A stream, queue, type or key that breaks the naming rules."""


class InvalidPayload(EchoMQError, ValueError):
    """Data that isn't strict JSON, can't be stored, or is too large."""


class InvalidResult(InvalidPayload):
    """Recorded as the error of a job that returned what can't be stored. It isn't run again."""


class InvalidArgument(EchoMQError, ValueError):
    """A limit, a time or an option that is out of its range, or of another type."""


class WrongBrand(EchoMQError, ValueError):
    """An id of another kind, or a text that is no id at all."""


class CursorError(EchoMQError):
    """A reader's cursor doesn't name a place in the stream.

    `first_position`, `write_cursor` and `epoch` say what the stream holds now,
    all three from the same snapshot.
    """

    def __init__(
        self, message: str, *, stream: str, first_position: int, write_cursor: int, epoch: str
    ) -> None:
        super().__init__(message)
        self.stream = stream
        self.first_position = first_position
        self.write_cursor = write_cursor
        self.epoch = epoch


class CursorExpired(CursorError):
    """The cursor lies below the oldest retained record: something was missed."""

    def __init__(
        self, *, stream: str, requested: int, first_position: int, write_cursor: int, epoch: str
    ) -> None:
        missed = first_position - requested
        super().__init__(
            f"Cursor {requested} of stream {stream!r} has expired: {missed} record(s) before "
            f"position {first_position} were trimmed. Reload your state from its source, then "
            f"read on from {first_position} (oldest retained) or {write_cursor} (head).",
            stream=stream,
            first_position=first_position,
            write_cursor=write_cursor,
            epoch=epoch,
        )
        self.requested = requested
        self.missed = missed


class CursorInvalid(CursorError):
    """The cursor or token never named a place in this life of the stream.

    `reason` is one of `malformed` (no token at all), `ahead` (above the write
    cursor), `epoch` (of an earlier life of the stream), `diverged` (same epoch,
    but history before the cursor was replaced: a failover or a restored backup).
    """

    def __init__(
        self,
        *,
        stream: str,
        reason: str,
        requested: object,
        first_position: int,
        write_cursor: int,
        epoch: str,
    ) -> None:
        why = {
            "malformed": "it is not a resume token; pass back a token exactly as you got it",
            "ahead": f"it lies above the write cursor {write_cursor} (was a backup restored?)",
            "epoch": f"it is of another life of the stream (now {epoch}); start over",
            "diverged": "the record before it was replaced; history has diverged, start over",
        }[reason]
        super().__init__(
            f"Cursor {requested!r} of stream {stream!r} is invalid ({reason}): {why}.",
            stream=stream,
            first_position=first_position,
            write_cursor=write_cursor,
            epoch=epoch,
        )
        self.reason = reason
        self.requested = requested


class UndecodableRecord(EchoMQError, ValueError):
    """The next record of a stream can't be decoded: SQL wrote it past the functions.

    `position` is the record's. Nothing before it was left out: read on from `position + 1`
    to skip it.
    """

    def __init__(self, *, stream: str, position: int, why: str) -> None:
        super().__init__(
            f"Record {position} of stream {stream!r} can't be decoded ({why}): it was written "
            "by SQL, not by append(). To skip it, read on from its position plus one, "
            f"{position + 1}; the database still has it as text."
        )
        self.stream = stream
        self.position = position


class WrongExpectedCursor(EchoMQError):
    """`expected_cursor` isn't the write cursor: somebody appended in between."""

    def __init__(self, *, stream: str, expected: int, write_cursor: int) -> None:
        super().__init__(
            f"Stream {stream!r} is at cursor {write_cursor}, not at the expected {expected}. "
            "Nothing was written. Read what came in between, decide again, and retry."
        )
        self.stream = stream
        self.expected = expected
        self.write_cursor = write_cursor


class UnknownStream(EchoMQError, LookupError):
    """No stream of that name: it was never written, or it was deleted."""

    def __init__(self, stream: str) -> None:
        super().__init__(
            f"There is no stream {stream!r}. The first append creates it; "
            "check the name and the database alias if you expected it to exist."
        )
        self.stream = stream


class TransactionError(EchoMQError):
    """The surrounding transaction doesn't allow this call."""


class IsolationError(TransactionError):
    """`append` or `delete` inside a REPEATABLE READ or SERIALIZABLE transaction.

    The transaction's snapshot is older than the stream's lock, so it can't see
    the last position.
    """


class InsideTransaction(TransactionError):
    """A call that has to see other transactions' commits, inside `atomic()`."""


class DatabaseLocked(EchoMQError):
    """SQLite refused the write lock (SQLITE_BUSY): nothing was written."""


class UnknownJob(EchoMQError, LookupError):
    """No job of that id."""


class UnknownTask(EchoMQError, LookupError):
    """The path that a job names leads to something that is no task."""


class EngineStopped(EchoMQError):
    """The process is ending, so its background loop takes no more work."""


class BadToken(EchoMQError, ValueError):
    """A signed token that is unknown, expired, or of somebody who may not log in."""


class WorkerError(EchoMQError):
    """A worker that can't start or can't go on as configured."""


class WorkerLost(EchoMQError):
    """Recorded as a job's error when its worker's lease was lost: killed, or cut off."""


class ProcessLost(EchoMQError):
    """Recorded as a job's error when its handler's process ended: killed, or by itself."""


class JobCancelled(EchoMQError):
    """Raised by a handler at a safe point, because its token was cancelled.

    `reason` is the first reason given, or `None`; `kind` says who gave it, as
    `CancelToken.kind` does.
    """

    # Of the class too: a subclass need not call `__init__`.
    reason: str | None = None
    kind: str = "user"

    def __init__(self, reason: str | None = None, kind: str = "user") -> None:
        super().__init__(reason or "cancelled")
        self.reason = reason
        self.kind = kind
