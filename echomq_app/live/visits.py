"""The small questions of many connections to the database, asked in few visits to its thread.

Each visit may cost a database connection: Django closes them after a request, and so does
`in_database_thread`. A thousand pages that come back at once would make some thousand, one
after the other. Here all that wait when a visit begins go along.
"""

from __future__ import annotations

import asyncio
import contextvars
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from django.db import Error as DatabaseError

from ..models.threads import close_old_connections, in_database_thread

MOST = 50
"""Questions of one visit: others use the thread too."""

T = TypeVar("T")
_Settle = Callable[[asyncio.Future[Any]], None]


class _Question(NamedTuple):
    ask: Callable[[], Any]
    answer: asyncio.Future[Any]


class _Visits:
    """The questions of one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[_Question] = deque()
        self._task: asyncio.Task[None] | None = None

    def ask(self, question: _Question) -> None:
        self._waiting.append(question)
        if self._task is None:
            self._task = asyncio.ensure_future(self._visit())

    async def _visit(self) -> None:
        try:
            while self._waiting:
                count = min(MOST, len(self._waiting))
                await self._ask_all([self._waiting.popleft() for _ in range(count)])
        finally:
            self._task = None
            for question in self._waiting:  # only when the loop ends
                question.answer.cancel()

    async def _ask_all(self, questions: list[_Question]) -> None:
        try:
            answers = await in_database_thread(_answer_all, questions)
        except Exception as error:  # noqa: BLE001  (no thread: the process ends)
            answers = [partial(_fail, error)] * len(questions)
        except BaseException:
            for question in questions:
                question.answer.cancel()
            raise
        for question, settle in zip(questions, answers, strict=True):
            if not question.answer.done():
                settle(question.answer)


def _answer_all(questions: list[_Question]) -> list[_Settle]:
    return [_answer(question) for question in questions]


def _answer(question: _Question) -> _Settle:
    if question.answer.cancelled():  # its connection is gone
        return partial(_succeed, None)
    try:
        try:
            return partial(_succeed, question.ask())
        except DatabaseError:
            # A connection that broke during this visit must not fail all questions after it.
            if not close_old_connections():
                raise
            return partial(_succeed, question.ask())
    except Exception as error:  # noqa: BLE001  (handed to whoever asked)
        return partial(_fail, error)


def _succeed(result: Any, answer: asyncio.Future[Any]) -> None:
    answer.set_result(result)


def _fail(error: Exception, answer: asyncio.Future[Any]) -> None:
    answer.set_exception(error)


_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Visits] = (
    weakref.WeakKeyDictionary()
)


async def in_shared_visit(ask: Callable[[], T]) -> T:
    """Run a short sync call that reads in the database thread, with others'.

    In the caller's context. Once more if its connection turns out to be broken.
    """
    loop = asyncio.get_running_loop()
    visits = _by_loop.get(loop)
    if visits is None:
        visits = _by_loop[loop] = _Visits()
    context = contextvars.copy_context()
    answer: asyncio.Future[T] = loop.create_future()
    visits.ask(_Question(lambda: context.run(ask), answer))
    return await answer
