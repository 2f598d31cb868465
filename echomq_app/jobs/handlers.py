"""Run one attempt: import the task, call the handler, say how it ended.

What the handler raises never leaves here, not even `SystemExit` or `CancelledError`:
every attempt has an outcome. The database connections of the handler's thread are
closed around it as Django does around a request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, TypeAlias

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import close_old_connections, connections
from django.db.transaction import TransactionManagementError

from ..exceptions import InvalidResult, JobCancelled
from ..models.job import KIND_MAX
from ..models.times import now
from .announcing import send
from .arguments import as_result
from .connections import drop_open_transactions, open_transactions
from .context import JobContext, Report
from .outcomes import REASON_MAX, Ending, Outcome, error_record, storable_text
from .results import JobResult, backend_of, result_of_claim
from .running import RunningJob
from .tasks import backend_class, load_task
from .tasks_api import Task, task_started

logger = logging.getLogger("echomq.jobs")

_Handled: TypeAlias = tuple[Any, BaseException | None]
"""What a handler returned, or raised."""

_thread = threading.local()
_JUST_NOW = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A handler and what it is called with."""

    job: RunningJob
    task: Task
    backend: type[Any]
    """The class of the task's backend: who sends Django's signals."""
    result: JobResult
    args: list[Any]
    kwargs: dict[str, Any]


def prepare(job: RunningJob, report: Report) -> Call | Outcome | None:
    """Import the task and make the call; the outcome, if that fails."""
    claimed = job.claimed
    try:
        task = load_task(claimed.task_path)
        result = result_of_claim(claimed, task, backend_of(claimed.options))
        args = list(claimed.arguments["args"])
        kwargs = dict(claimed.arguments["kwargs"])
    except BaseException as error:  # noqa: BLE001  (an import may even exit)
        return _raised(job, error)
    job.start_clock()
    if task.takes_context:
        context = JobContext(
            task_result=result,
            job_id=claimed.id,
            cancel=job.token,
            _attempt=claimed.attempt,
            _report=report,
        )
        args.insert(0, context)
    backend = backend_class(task.backend)
    return Call(job=job, task=task, backend=backend, result=result, args=args, kwargs=kwargs)


def is_async(call: Call) -> bool:
    """Tell whether the handler runs on the event loop."""
    return iscoroutinefunction(call.task.func)


def run_sync(call: Call) -> Outcome | None:
    """Call the handler in this thread."""
    if time.monotonic() - getattr(_thread, "closed_at", 0.0) > _JUST_NOW:
        close_old_connections()  # else that was done just now, after the last handler
    try:
        return run_here(call, partial(_whole, call.task.func))
    finally:
        close_old_connections()
        drop_open_transactions()
        _thread.closed_at = time.monotonic()


def _whole(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the handler; what it wrote and didn't commit is no success."""
    value = function(*args, **kwargs)
    if left := open_transactions():
        raise TransactionManagementError(
            f"The handler returned within a transaction of {', '.join(left)}: what it wrote there "
            "was rolled back. End each transaction.atomic(), best by `with`."
        )
    return value


def run_here(call: Call, function: Callable[..., Any]) -> Outcome | None:
    """Call `function` as the handler, with the connections as they are."""
    send(task_started, call.backend, call.result)
    process = os.getpid()
    try:
        value = function(*call.args, **call.kwargs)
    except BaseException as error:  # noqa: BLE001
        _end_copy(process)
        return _ended(call, error)
    _end_copy(process)
    return _returned(call, value)


def _end_copy(process: int) -> None:
    """End this process if it isn't `process`: a handler has forked, and its copy came back.

    It would tell the worker how the attempt ended too, and go on with the worker's next jobs.
    """
    if os.getpid() != process:
        os._exit(1)


async def run_async(call: Call) -> Outcome | None:
    """Call the handler on this loop; what it does in threads has a thread of its own."""
    async with ThreadSensitiveContext():
        try:
            await sync_to_async(send)(task_started, call.backend, call.result)
            # A task of its own: a cancel that the handler or its library aims at the running
            # task, and that comes when it has returned, must not hit what follows here.
            handler = asyncio.ensure_future(_handle(call))
            try:
                await asyncio.wait([handler])
                return await sync_to_async(_end_of)(call, handler)
            except CancelledError:
                # Something on this loop cancels every task. A handler that has ended has ended.
                if not handler.done():
                    raise
                return _end_of(call, handler) or call.job.outcome
        finally:
            # The thread ends with the context: a connection kept there would leak.
            await sync_to_async(connections.close_all)()


def _end_of(call: Call, handler: asyncio.Future[_Handled]) -> Outcome | None:
    value, error = (None, CancelledError()) if handler.cancelled() else handler.result()
    return _returned(call, value) if error is None else _ended(call, error)


async def _handle(call: Call) -> _Handled:
    """Return what the handler returned, or raised: asyncio would let some errors end the loop."""
    try:
        return await call.task.func(*call.args, **call.kwargs), None
    except BaseException as error:  # noqa: BLE001
        return None, error


def not_begun(job: RunningJob) -> Outcome | None:
    """Say that an attempt was cancelled before its handler began: then it doesn't."""
    token = job.token
    return job.finish(Ending.STOPPED, at=now(), reason=token.reason, kind=token.kind or "")


def broken(job: RunningJob, error: BaseException) -> Outcome | None:
    """Return the outcome of an attempt in which something unforeseen was raised.

    If the handler has ended before, that counts.
    """
    if job.finished:
        logger.warning("event=cleanup_failed job=%s", job.claimed.id, exc_info=error)
        return job.outcome
    return _raised(job, error) or job.outcome


def _returned(call: Call, value: Any) -> Outcome | None:
    try:
        text = as_result(value)
    except InvalidResult as error:
        return _raised(call.job, error, Ending.UNSTORABLE)
    return call.job.finish(Ending.RETURNED, at=now(), result=text)


def _ended(call: Call, error: BaseException) -> Outcome | None:
    """Return the outcome of a handler that raised."""
    job = call.job
    if not isinstance(error, JobCancelled):
        return _raised(job, error)
    if job.timed_out:
        return _raised(job, _timeout_of(error))
    # A handler may raise JobCancelled with anything.
    reason = None if error.reason is None else storable_text(error.reason, REASON_MAX)
    kind = storable_text(error.kind or "user", KIND_MAX)[:KIND_MAX]
    return job.finish(Ending.STOPPED, at=now(), reason=reason, kind=kind)


def _raised(
    job: RunningJob, error: BaseException, ending: Ending = Ending.RAISED
) -> Outcome | None:
    at = now()
    claimed = job.claimed
    record = error_record(error, attempt=claimed.attempt, worker=claimed.worker_name, at=at)
    logger.warning(
        "event=attempt_failed job=%s task=%s attempt=%d of=%d error=%s",
        claimed.id,
        claimed.task_path,
        claimed.attempt,
        claimed.max_attempts,
        record["class"],
        exc_info=error,
    )
    return job.finish(ending, at=at, error=record, exception=error)


def _timeout_of(error: JobCancelled) -> TimeoutError:
    timeout = TimeoutError(error.reason or "the job's timeout passed")
    timeout.__cause__ = error
    return timeout
