"""Many questions to the database share a visit to its thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator

import pytest
from django.contrib.auth.models import User
from django.db.backends.signals import connection_created

from echomq_app.live import access
from echomq_app.live.visits import in_shared_visit

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def made() -> Iterator[list[str]]:
    """Give the connections made so far, by thread."""
    found: list[str] = []

    def note(**kwargs: object) -> None:
        found.append(threading.current_thread().name)

    connection_created.connect(note)
    yield found
    connection_created.disconnect(note)


async def test_a_crowd_makes_few_connections(made: list[str]) -> None:
    user = await User.objects.acreate_superuser("ada", password="x")
    token = access.make_token(user)
    made.clear()

    async def come() -> bool:
        identity = await access.identify_token(token)
        return await access.allowed(identity, "stream.read", "orders")

    answers = await asyncio.gather(*(come() for _ in range(200)))
    assert all(answers)
    # 400 questions. The first goes alone, and then all that came meanwhile, 50 at a time.
    assert len(made) <= 20


async def test_each_gets_its_own_answer_or_error() -> None:
    def answer(number: int) -> int:
        if number % 3 == 0:
            raise LookupError(number)
        return number

    asked = [in_shared_visit(lambda number=number: answer(number)) for number in range(200)]  # type: ignore[misc]
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for number, got in enumerate(answers):
        if number % 3:
            assert got == number
        else:
            assert isinstance(got, LookupError)
            assert got.args == (number,)


async def test_asked_in_the_context_of_who_asks() -> None:
    tenant: contextvars.ContextVar[int] = contextvars.ContextVar("tenant")

    async def ask(number: int) -> int:
        tenant.set(number)
        return await in_shared_visit(tenant.get)

    assert await asyncio.gather(*(ask(number) for number in range(20))) == list(range(20))


async def test_who_has_gone_is_not_asked_for() -> None:
    reached, release = threading.Event(), threading.Event()
    asked: list[str] = []

    def first() -> None:
        reached.set()
        release.wait(30)

    holding = asyncio.create_task(in_shared_visit(first))
    await asyncio.to_thread(reached.wait, 30)
    gone = asyncio.create_task(in_shared_visit(lambda: asked.append("gone")))
    stays = asyncio.create_task(in_shared_visit(lambda: asked.append("stays")))
    await asyncio.sleep(0)
    gone.cancel()
    release.set()
    await asyncio.wait_for(asyncio.gather(holding, stays), 30)
    assert asked == ["stays"]
    assert gone.cancelled()
