"""Tasks whose handlers run in processes, for the tests of those."""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from django.db import connection
from django.utils import translation

from echomq_app.exceptions import JobCancelled
from echomq_app.jobs.context import JobContext
from echomq_app.jobs.options import job_options
from echomq_app.jobs.tasks_api import task
from tests.jobtasks import UNSTORABLE, mark, report_oddly


class CannotBeRebuilt(Exception):
    """Neither goes into a pickle nor comes out of one."""

    def __init__(self, one: str, *, two: str) -> None:
        super().__init__(one)
        self.two = two

    def __reduce__(self) -> NoReturn:
        raise TypeError("not me")


def where() -> list[Any]:
    return [os.getpid(), threading.current_thread() is threading.main_thread()]


@task
@job_options(process=True)
def pid(trace: str = "") -> list[Any]:
    if trace:
        mark(trace, f"pid {os.getpid()}")
    return where()


@task
@job_options(process=True)
def echo(value: Any) -> Any:
    return value


@task(takes_context=True)
@job_options(process=True)
async def asleep(context: JobContext, trace: str) -> list[Any]:
    """Wait for the cancel on a loop, and return all the same."""
    context.progress(0.25, "async")
    mark(trace, "start")
    await asyncio.sleep(0)
    found = await context.cancel.wait_async()
    mark(trace, f"cancelled {found.reason} {found.kind}")
    return where()


@task(takes_context=True)
@job_options(process=True, backoff=0)
def until_cancelled(context: JobContext, trace: str, then: str = "stop") -> str:
    mark(trace, f"start {context.attempt} {os.getpid()}")
    context.progress(0.5, "halfway")
    context.cancel.wait(60)
    mark(trace, f"cancelled {context.cancel.reason} {context.cancel.kind}")
    if then == "return":
        return "ignored it"
    if then == "stay":
        time.sleep(60)
    context.check()
    raise AssertionError("the token was not cancelled")


@task(takes_context=True)
@job_options(process=True, timeout=0.2, max_attempts=1)
def times_out(context: JobContext) -> None:
    if context.cancel.wait(30):
        context.check()


@task(takes_context=True)
@job_options(process=True)
def reports(context: JobContext, times: int) -> float:
    """Report as often as it can; return the seconds that it took."""
    began = time.monotonic()
    for number in range(times):
        context.progress(number / times, f"{number}\ud800")
    context.progress(1, "all")
    return time.monotonic() - began


@task(takes_context=True)
@job_options(process=True, max_attempts=3, backoff=0)
def reports_oddly(context: JobContext) -> str:
    return report_oddly(context)


@task
@job_options(process=True, max_attempts=1)
def raises() -> None:
    raise CannotBeRebuilt("on purpose", two="x")


@task
@job_options(process=True, max_attempts=1)
def returns_a_set() -> Any:
    return {1, 2}


@task
@job_options(process=True, max_attempts=3, backoff=0)
def returns(what: str, trace: str) -> Any:
    mark(trace, "ran")
    return UNSTORABLE[what][0]()


@task
@job_options(process=True, max_attempts=1)
def exits() -> None:
    raise SystemExit(3)


@task
@job_options(process=True, max_attempts=1)
def dies(trace: str, how: str) -> None:
    mark(trace, "start")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(7)
    elif how == "fault":
        ctypes.string_at(0)
    elif how == "leave a child":
        child = os.fork()
        if not child:
            time.sleep(60)
        mark(trace, str(child))
        os.kill(os.getpid(), signal.SIGKILL)


@task
@job_options(process=True)
def dies_once(trace: str) -> str:
    if not Path(trace).exists():
        mark(trace, "start")
        os.kill(os.getpid(), signal.SIGKILL)
    return "second"


@task
@job_options(process=True)
def forks() -> int:
    """Fork, and have the copy come back from the handler as well; return its exit code."""
    copy = os.fork()
    if not copy:
        return -1
    return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])


@task
@job_options(process=True)
def waits_for(trace: str) -> int:
    """Go on when the test says so."""
    mark(trace, f"start {os.getpid()}")
    end = time.monotonic() + 60
    while not Path(f"{trace}.go").exists() and time.monotonic() < end:
        time.sleep(0.01)
    return os.getpid()


@task
@job_options(process=True)
def activate_language(language: str) -> str:
    found = translation.get_language()
    translation.activate(language)
    return found or ""


@task
@job_options(process=True)
def backend_pid() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return int(cursor.fetchone()[0])


@task
@job_options(process=True)
def imports() -> list[Any]:
    return [sys.path, os.environ["DJANGO_SETTINGS_MODULE"], sys.argv]


@task
@job_options(process=True)
def keeps_the_interpreter(trace: str) -> bool:
    """Spend years in C, without a chance for any other thread."""
    mark(trace, f"start {os.getpid()}")
    return re.match(r"(a+)+$", "a" * 60 + "b") is None


@task
@job_options(process=True)
def says_when_it_ends(trace: str) -> int:
    """Return the pid; the process marks its end if that is a regular one."""
    atexit.register(mark, trace, "end")
    return os.getpid()


@task
@job_options(process=True)
def stops_oddly() -> None:
    raise JobCancelled(7, kind=None)  # type: ignore[arg-type]
