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
from typing import Any

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import close_old_connections, connections
from django.db.transaction import TransactionManagementError

from ..conf import current
from ..core.payload import encode
from ..exceptions import InvalidPayload, JobCancelled
from ..models.job import KIND_MAX
from ..models.times import as_django, now
from .connections import drop_open_transactions, open_transactions
from .context import JobContext, Report
from .outcomes import REASON_MAX, Ending, Outcome, error_record, storable_text
from .results import JobResult, error_of, result_of_claim
from .running import Asked, RunningJob
from .tasks import backend_class, load_task
from .tasks_api import Task, TaskResultStatus, normalize_json, task_finished, task_started

logger = logging.getLogger("echomq.jobs")

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
        result = result_of_claim(claimed, task)
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
    _send(task_started, call)
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
            await sync_to_async(_send)(task_started, call)
            # A task of its own: a cancel that the handler or its library aims at the running
            # task, and that comes when it has returned, must not hit what follows here.
            handler = asyncio.ensure_future(_handle(call))
            await asyncio.wait([handler])
            value, error = (None, CancelledError()) if handler.cancelled() else handler.result()
            if error is not None:
                return await sync_to_async(_ended_async)(call, error)
            return await sync_to_async(_returned)(call, value)
        finally:
            # The thread ends with the context: a connection kept there would leak.
            await sync_to_async(connections.close_all)()


async def _handle(call: Call) -> tuple[Any, BaseException | None]:
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
    """Say how an attempt ended that nothing here foresaw."""
    return _raised(job, error) or job.outcome


def _returned(call: Call, value: Any) -> Outcome | None:
    try:
        plain = normalize_json(value)
        text = encode(plain, limit=current().MAX_RECORD_BYTES, what="the job's result").decode()
    except (TypeError, ValueError) as error:
        try:
            raise InvalidPayload(f"The job's result can't be stored as JSON: {error}") from error
        except InvalidPayload as refused:
            return _ended(call, refused)
    _finish_result(call, TaskResultStatus.SUCCESSFUL, plain)
    return call.job.finish(Ending.RETURNED, at=now(), result=text)


def _ended_async(call: Call, error: BaseException) -> Outcome | None:
    # In another thread the exception isn't the current one; receivers log the current one.
    try:
        raise error
    except BaseException:  # noqa: BLE001
        return _ended(call, error)


def _ended(call: Call, error: BaseException) -> Outcome | None:
    """Say what an exception means. Called while it is handled."""
    job = call.job
    if isinstance(error, JobCancelled):
        if job.timed_out:
            error = _timeout_of(error)
        else:
            return _stopped(call, error)
    outcome = _raised(job, error)
    if outcome is not None and _is_last(job):
        if outcome.error is not None:
            call.result.errors.append(error_of(outcome.error))
        _finish_result(call, TaskResultStatus.FAILED)
    return outcome


def _stopped(call: Call, error: JobCancelled) -> Outcome | None:
    job = call.job
    # A handler may raise JobCancelled with anything.
    reason = None if error.reason is None else storable_text(error.reason, REASON_MAX)
    kind = storable_text(error.kind or "user", KIND_MAX)[:KIND_MAX]
    outcome = job.finish(Ending.STOPPED, at=now(), reason=reason, kind=kind)
    if outcome is not None and not outcome.by_worker:
        record = error_record(
            error, attempt=outcome.attempt, worker=job.claimed.worker_name, at=outcome.at
        )
        call.result.errors.append(error_of(record))
        _finish_result(call, TaskResultStatus.FAILED)
    return outcome


def _raised(job: RunningJob, error: BaseException) -> Outcome | None:
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
    return job.finish(Ending.RAISED, at=at, error=record)


def _timeout_of(error: JobCancelled) -> TimeoutError:
    timeout = TimeoutError(error.reason or "the job's timeout passed")
    timeout.__cause__ = error
    return timeout


def _is_last(job: RunningJob) -> bool:
    """Tell whether this failure is the end, as far as this worker knows."""
    claimed = job.claimed
    return job.asked is Asked.CANCEL or claimed.attempt >= claimed.max_attempts


def _finish_result(call: Call, status: Any, value: Any = None) -> None:
    for name, new in (
        ("status", status),
        ("finished_at", as_django(now())),
        ("_return_value", value),
    ):
        object.__setattr__(call.result, name, new)
    _send(task_finished, call)


def _send(signal: Any, call: Call) -> None:
    """Send one of Django's task signals. A receiver's error is its own."""
    try:
        responses = signal.send_robust(call.backend, task_result=call.result)
    except BaseException as error:  # not even SystemExit is the job's
        logger.exception("event=receiver_failed job=%s error=%r", call.job.claimed.id, error)
        return
    for receiver, response in responses:
        if isinstance(response, Exception):
            logger.error(
                "event=receiver_failed receiver=%r job=%s",
                receiver,
                call.job.claimed.id,
                exc_info=response,
            )
