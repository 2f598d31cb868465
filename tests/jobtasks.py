"""Tasks that the tests of jobs enqueue, also for workers in other processes.

They tell what they do in a folder (`ECHOMQ_TEST_TRACE`, or the argument `trace`): a file
grows by a line for each start, so a test sees starts that left nothing in the database.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asgiref.sync import sync_to_async
from django.db import transaction
from django.utils import translation

from echomq_app.exceptions import JobCancelled
from echomq_app.jobs.context import JobContext
from echomq_app.jobs.options import job_options
from echomq_app.jobs.tasks_api import task
from echomq_app.models import Job, Worker


def mark(trace: str, line: str) -> None:
    """Append a line in one write, which a killed process has either done or not."""
    descriptor = os.open(trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


def marks(trace: str | Path) -> list[str]:
    """Read what was marked."""
    path = Path(trace)
    return path.read_text().split("\n")[:-1] if path.exists() else []


@task
def noop(number: int) -> int:
    return number


@task
def add(a: int, b: int) -> int:
    return a + b


@task
async def aadd(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


@task
def echo(value: Any) -> Any:
    return value


@task
def returns_a_set() -> Any:
    return {1, 2}


class Unreadable(Sequence[int]):
    """A sequence that can't be read, as one of rows that are gone."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        raise KeyError("gone")


def endless() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


UNSTORABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "a model instance": (lambda: [Worker()], "result[0]"),
    "a key that is no text": (lambda: {"a": {1: "a"}}, "result.a"),
    "a date": (lambda: {"when": [dt.date(2026, 1, 1)]}, "result.when[0]"),
    "too long": (lambda: "x" * (2 << 20), "MAX_RECORD_BYTES"),
    "NaN": (lambda: [1, float("nan")], "result[1]"),
    "NUL": (lambda: "a\0", "NUL"),
    "endless": (endless, "nested deeper"),
    "unreadable": (Unreadable, "KeyError"),
}
"""What no job can return, and what the error says."""


@task
@job_options(max_attempts=3, backoff=0)
def returns(what: str, trace: str) -> Any:
    mark(trace, "ran")
    return UNSTORABLE[what][0]()


@task
@job_options(max_attempts=3, backoff=0)
async def areturns(what: str, trace: str) -> Any:
    mark(trace, "ran")
    return UNSTORABLE[what][0]()


@task
@job_options(max_attempts=3, backoff=0)
async def returns_and_cancels_everything(trace: str) -> str:
    """Leave behind a cancel of all that runs on the loop, as the end of a library may be."""
    mark(trace, "ran")

    def cancel_all() -> None:
        for running in asyncio.all_tasks():
            running.cancel()

    loop = asyncio.get_running_loop()
    loop.call_soon(cancel_all)
    loop.call_soon(loop.call_soon, cancel_all)
    return "done"


@task
@job_options(max_attempts=3, backoff=0)
def fail(message: str = "no") -> None:
    raise ValueError(message)


@task
@job_options(max_attempts=3, backoff=0)
def fail_until(attempt: int, trace: str) -> str:
    mark(trace, "start")
    if len(marks(trace)) < attempt:
        raise ValueError("not yet")
    return "done"


@task(takes_context=True)
def note(context: JobContext, trace: str) -> int:
    mark(trace, str(context.job_id))
    return context.attempt


@task(takes_context=True)
async def anote(context: JobContext, trace: str) -> int:
    mark(trace, str(context.job_id))
    return context.attempt


@task
def exit_hard(trace: str) -> None:
    mark(trace, "start")
    os._exit(1)


@task
def kill_the_process(trace: str) -> None:
    mark(trace, "killed")
    os.kill(os.getpid(), signal.SIGKILL)


@task
def exit_softly() -> None:
    raise SystemExit(3)


@task
async def cancel_itself() -> None:
    raise asyncio.CancelledError


@task
async def cancel_itself_and_return() -> None:
    """Leave a cancel behind, as a library does whose scope ends late."""
    running = asyncio.current_task()
    assert running is not None
    running.cancel()


@task
async def cancel_itself_afterwards() -> None:
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().call_soon(running.cancel)


@task
async def cancel_everything() -> None:
    for running in asyncio.all_tasks():
        running.cancel()
    await asyncio.sleep(60)


@task
async def exit_in_a_task() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    await asyncio.create_task(leave())


@task
async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    raise ValueError("still here")


@task(takes_context=True)
@job_options(max_attempts=3, backoff=0)
def until_cancelled(context: JobContext, trace: str, then: str = "stop") -> str:
    """Run until cancelled; then stop, return, raise, or go on for ever."""
    mark(trace, f"start {context.attempt}")
    context.progress(0.5, "halfway")
    context.cancel.wait(60)
    mark(trace, f"cancelled {context.cancel.reason}")
    if then == "return":
        return "ignored it"
    if then == "raise":
        raise ValueError("after the cancel")
    if then == "stay":
        time.sleep(60)
    context.check()
    raise AssertionError("the token was not cancelled")


def report_oddly(context: JobContext) -> str:
    """Report what is no progress, more than all, and at last all."""
    report: Any = context.progress
    odd: list[Any] = ["50 %", None, [], NoText()]
    for given in odd:
        report(given)
    report(1, [])
    report(float("nan"), "a\0\ud800b")
    report(1001, 1000, "x" * 100_000)
    report(0, 0, "nothing to do")
    return "done"


@task(takes_context=True)
@job_options(max_attempts=3, backoff=0)
def reports_oddly(context: JobContext) -> str:
    return report_oddly(context)


@task(takes_context=True)
@job_options(max_attempts=3, backoff=0)
async def areports_oddly(context: JobContext) -> str:
    return report_oddly(context)


@task(takes_context=True)
@job_options(max_attempts=3, backoff=0)
def reports_in_a_broken_transaction(context: JobContext) -> str:
    """Go on in a transaction that is to be rolled back, as one does who cleans up."""
    with transaction.atomic():
        transaction.set_rollback(True)
        context.progress(1, 2)
    return "done"


@task(takes_context=True)
async def until_cancelled_async(context: JobContext, trace: str) -> None:
    mark(trace, f"start {context.attempt}")
    context.progress(0.5, "halfway")
    found = await context.cancel.wait_async()
    mark(trace, f"cancelled {found.reason}")
    context.check()


@task(takes_context=True)
@job_options(timeout=0.2, max_attempts=1)
def times_out(context: JobContext) -> None:
    if context.cancel.wait(30):
        context.check()


@task
def stops_by_itself() -> None:
    raise JobCancelled("nothing to do")


class NoReason(JobCancelled):
    def __init__(self) -> None:
        Exception.__init__(self)


class NoText:
    def __str__(self) -> str:
        raise RuntimeError("no text")


ODD: dict[str, tuple[Any, ...]] = {
    "no JSON": (NoText(), NoText()),
    "surrogates": ("a\ud800", "b\ud800"),
    "NUL": ("a\0", "b\0"),
    "long": ("a" * 200_000, "b" * 200),
}


@task
def stops_oddly(what: str) -> None:
    """Stop with a reason and a kind that no database holds."""
    raise JobCancelled(*ODD[what]) if what in ODD else NoReason


@task
def sleep(seconds: float, trace: str = "") -> str:
    if trace:
        mark(trace, "start")
    time.sleep(seconds)
    return "slept"


@task
async def block_the_loop(seconds: float, trace: str) -> str:
    """Sleep without yielding: the loop of all async jobs stands still."""
    mark(trace, "start")
    time.sleep(seconds)  # noqa: ASYNC251
    return "slept"


@task
def spin(seconds: float, trace: str) -> int:
    """Keep the interpreter busy."""
    mark(trace, "start")
    turns, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        turns += 1
    return turns


@task
@job_options(max_attempts=1)
def raise_text(hex: str) -> None:
    raise ValueError(bytes.fromhex(hex).decode("utf-8", "surrogatepass"))


_kept: list[bytes] = []


@task
def keep_memory(mebibytes: int) -> None:
    """Take memory and never give it back."""
    _kept.append(b"x" * (mebibytes << 20))


@task
def environment(name: str) -> str | None:
    return os.environ.get(name)


@task
@job_options(max_attempts=1)
def leave_a_transaction_open() -> None:
    """Leave an `atomic()` as somebody does who forgets its end."""
    transaction.atomic().__enter__()
    Job.objects.update(max_attempts=77)


@task
def activate_language(language: str) -> str:
    """Return the language that was active, and leave another one behind."""
    found = translation.get_language()
    translation.activate(language)
    return found or ""


@task
def write(host: str) -> None:
    Worker.objects.update(host=host)


@task
def query() -> int:
    return Job.objects.count()


@task
async def aquery() -> int:
    return await Job.objects.acount()


_meeting = threading.Barrier(2)


@task
@job_options(max_attempts=1)
async def meet_in_a_thread() -> None:
    """Wait in a thread for another such job that does the same."""
    await sync_to_async(_meeting.wait)(10)


@task(takes_context=True)
def holds_on(context: JobContext, trace: str) -> None:
    """See the cancel, and go on until the test says so."""
    mark(trace, "start")
    context.cancel.wait(60)
    mark(trace, "seen")
    end = time.monotonic() + 60
    while not Path(f"{trace}.go").exists() and time.monotonic() < end:
        time.sleep(0.01)
    context.check()


@task
def mark_the_start(trace: str) -> None:
    """Mark the machine's monotonic clock."""
    mark(trace, repr(time.monotonic()))


@task(takes_context=True)
def mark_the_cancel(context: JobContext, trace: str) -> None:
    """Mark the start, and the machine's monotonic clock when the token is cancelled."""
    mark(trace, "start")
    if context.cancel.wait(60):
        mark(trace, repr(time.monotonic()))


@task
@job_options(unique=True)
def once_per_arguments(a: int, b: Any = 0) -> int:
    return a


@task(takes_context=True)
def stops_if_the_lease_is_lost(context: JobContext) -> None:
    """Wait for that on the first claim; a job's later claims return at once."""
    if Job.objects.get(pk=context.job_id).fence == 1:
        context.cancel.wait(60)
    context.check()


@task(takes_context=True)
def marks_the_kind(context: JobContext, trace: str) -> None:
    """Mark what the token and the exception say."""
    mark(trace, "start")
    context.cancel.wait(60)
    try:
        context.check()
    except JobCancelled as error:
        mark(trace, f"{context.cancel.kind} {error.kind} {error.reason}")
        raise


not_a_task = "just a text"
