"""The engine against real brokers: sending in the background, wake-ups, losses."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from channels.layers import channel_layers as layer_manager

from echomq_app import engine, signals
from echomq_app.core.names import stream_wake_group
from echomq_app.engine.broker import Broker
from echomq_app.engine.process import engine as the_engine
from echomq_app.engine.wake import Notifier
from tests.layers import (
    CORE,
    ECHO,
    IN_MEMORY,
    PUBSUB,
    channel_layers,
    hung_server,
    use_layers,
)
from tests.servers import Redis
from tests.wait import wait_until

GROUP = stream_wake_group("orders")
brokers = pytest.mark.parametrize("backend", [CORE, PUBSUB])


@contextlib.contextmanager
def losses() -> Iterator[list[dict[str, Any]]]:
    """Collect what `publish_failed` tells."""
    told: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        told.append(kwargs)

    signals.publish_failed.connect(receive)
    try:
        yield told
    finally:
        signals.publish_failed.disconnect(receive)


@contextlib.contextmanager
def listening_layer(backend: str, url: str, *groups: str) -> Iterator[tuple[Any, str]]:
    """Give a layer instance of another "process": a loop of our own, a channel in the groups."""
    with asyncio.Runner() as runner:
        layer: Any = layer_manager.make_backend("default")

        async def join() -> str:
            channel: str = await layer.new_channel()
            for group in groups:
                await layer.group_add(group, channel)
            return channel

        channel = runner.run(join())

        def receive(timeout: float = 10.0) -> Any:
            async def once() -> Any:
                async with asyncio.timeout(timeout):
                    return await layer.receive(channel)

            return runner.run(once())

        try:
            yield receive, channel
        finally:
            runner.run(layer.close_pools() if backend == CORE else layer.flush())


# The loop.


def test_submit_runs_a_coroutine_and_brings_back_its_result_or_error() -> None:
    async def work(n: int) -> int:
        await asyncio.sleep(0)
        if n < 0:
            raise ValueError("negative")
        return n * 2

    with use_layers({}):
        assert engine.submit(lambda: work(21)).result(10) == 42
        with pytest.raises(ValueError, match="negative"):
            engine.submit(lambda: work(-1)).result(10)


def test_all_of_a_process_shares_one_daemon_thread() -> None:
    async def thread() -> threading.Thread:
        return threading.current_thread()

    with use_layers({}):
        barrier = threading.Barrier(8)

        def ask() -> threading.Thread:
            barrier.wait()
            return engine.submit(thread).result(10)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            threads = {future.result() for future in [pool.submit(ask) for _ in range(8)]}

        assert len(threads) == 1
        [one] = threads
        assert one.daemon
    assert not one.is_alive()


def test_cancelling_the_future_cancels_the_work() -> None:
    cancelled = threading.Event()
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    with use_layers({}):
        future = engine.submit(work)
        assert begun.wait(10)
        assert future.cancel()
        assert cancelled.wait(10)


def test_stopping_ends_what_runs_and_the_next_use_starts_afresh() -> None:
    ended = threading.Event()
    begun = threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def answer() -> int:
        return 1

    with use_layers({}):
        future = engine.submit(work)
        assert begun.wait(10)
        assert engine.stop()
        assert ended.is_set()
        assert future.cancelled() or future.exception(10) is not None
        assert engine.submit(answer).result(10) == 1


# Wake-ups.


def test_a_wake_up_works_with_no_layer_at_all_and_starts_no_thread() -> None:
    with use_layers({}), engine.waiter(GROUP) as waiter:
        assert not waiter.wait(0.01)
        engine.notify(stream_wake_group("another"))
        assert not waiter.is_set()
        engine.notify(GROUP)
        assert waiter.wait(10)
        assert not the_engine._thread.running


def test_a_wake_up_before_the_wait_is_not_lost_and_clear_forgets_it() -> None:
    with use_layers({}), engine.waiter(GROUP) as waiter:
        engine.notify(GROUP)

        assert waiter.wait(0)
        assert waiter.wait()
        waiter.clear()
        assert not waiter.wait(0)


def test_no_wake_up_is_lost_between_clear_read_and_wait() -> None:
    # The writer publishes only after the reader has read: exactly the moment in which an
    # order other than clear, read, wait loses it.
    written = 0
    turn, turned = threading.Semaphore(0), threading.Semaphore(0)

    def write() -> None:
        nonlocal written
        for _ in range(300):
            turn.acquire()
            written += 1
            engine.notify(GROUP)
            turned.release()

    with use_layers({}, NOTIFY_INTERVAL=1e-9), engine.waiter(GROUP) as waiter:
        writer = threading.Thread(target=write)
        writer.start()
        for number in range(300):
            waiter.clear()
            assert written == number  # read
            turn.release()
            turned.acquire()
            assert waiter.wait(10)
        writer.join()


async def test_an_async_reader_is_woken_from_another_thread() -> None:
    with use_layers({}), engine.waiter(GROUP) as waiter:
        waiting = asyncio.create_task(waiter.wait_async(10))
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.notify, GROUP)

        assert await waiting
        waiter.clear()
        assert not await waiter.wait_async(0.01)


def test_leaving_the_block_ends_a_wait_in_another_thread() -> None:
    with use_layers({}), engine.waiter(GROUP) as waiter:
        thread = threading.Thread(target=waiter.wait)
        thread.start()
        wait_until(lambda: len(waiter._wakers))
    thread.join(10)
    assert not thread.is_alive()


def test_the_first_wake_up_passes_at_once_and_the_last_one_passes_too() -> None:
    with use_layers({}, NOTIFY_INTERVAL=0.2), engine.waiter(GROUP) as waiter:
        wakes: list[float] = []
        real_set = waiter.set

        def set_and_count() -> None:
            wakes.append(time.monotonic())
            real_set()

        waiter.set = set_and_count  # type: ignore[method-assign]
        began = time.monotonic()
        while time.monotonic() - began < 0.5:
            engine.notify(GROUP)
            time.sleep(0.001)
        last_notified = time.monotonic()
        wait_until(lambda: wakes and wakes[-1] >= last_notified - 0.002)
        waiter.set = real_set  # type: ignore[method-assign]

    assert wakes[0] - began < 0.1
    assert 3 <= len(wakes) <= 5  # about 500 calls, at 0, 0.2, 0.4 and 0.6
    assert all(later - earlier > 0.19 for earlier, later in itertools.pairwise(wakes))


def test_later_wake_ups_come_after_pauses_of_another_length_each() -> None:
    delays: list[float] = []

    def call_later(delay: float, call: object, group: str) -> bool:
        delays.append(delay)
        return True

    with use_layers({}, NOTIFY_INTERVAL=100.0):
        notifier = Notifier(lambda group: None, call_later)
        for number in range(200):
            notifier.notify(f"{GROUP}{number}")
            assert len(delays) == number
            notifier.notify(f"{GROUP}{number}")
    assert all(90 < delay <= 125 for delay in delays) and max(delays) - min(delays) > 10


@brokers
def test_a_wake_up_reaches_another_process_once_and_ours_once(backend: str, redis_url: str) -> None:
    with use_layers(channel_layers(backend, redis_url)):
        with (
            engine.waiter(GROUP) as waiter,
            listening_layer(backend, redis_url, GROUP) as (receive, _),
        ):
            assert waiter.wait(10)  # joined
            waiter.clear()

            engine.notify(GROUP)

            assert waiter.is_set()  # directly, not by way of the broker
            waiter.clear()
            message = receive()
            assert message["type"] == "echomq.wake"
            assert message["group"] == GROUP
            assert engine.flush(5)
            # What comes back from the broker is our own, and isn't a second wake-up.
            engine.notify(stream_wake_group("fence"))
            assert engine.flush(5)
            assert not waiter.is_set()


@brokers
def test_a_wake_up_from_another_process_arrives(backend: str, redis_url: str) -> None:
    with use_layers(channel_layers(backend, redis_url)), engine.waiter(GROUP) as waiter:
        assert waiter.wait(10)  # joined
        waiter.clear()
        with listening_layer(backend, redis_url) as _, asyncio.Runner() as runner:
            layer: Any = layer_manager.make_backend("default")
            runner.run(
                layer.group_send(GROUP, {"type": "echomq.wake", "group": GROUP, "sender": "x"})
            )
            runner.run(layer.close_pools() if backend == CORE else layer.flush())

        assert waiter.wait(10)


def test_waiters_on_redis_leave_their_groups_behind_them_clean(
    redis_url: str, redis_server: Redis
) -> None:
    with use_layers(channel_layers(CORE, redis_url)), redis_server.client() as client:
        key = f"asgi:group:{GROUP}"
        with engine.waiter(GROUP) as one, engine.waiter(GROUP) as two:
            assert one.wait(10)
            assert two.wait(10)
            assert client.zcard(key) == 1  # one link for all
        wait_until(lambda: client.zcard(key) == 0)
        with engine.waiter(GROUP) as one:
            assert one.wait(10)
    # Stopped while joined: the membership would linger for a day otherwise.
    with use_layers(channel_layers(CORE, redis_url)), redis_server.client() as client:
        with engine.waiter(GROUP) as one:
            assert one.wait(10)
            assert engine.stop()
            assert client.keys("asgi:group:*") == []


# Sending.


@brokers
def test_messages_to_a_group_arrive_whole_and_in_order(backend: str, redis_url: str) -> None:
    with use_layers(channel_layers(backend, redis_url)):
        with listening_layer(backend, redis_url, GROUP) as (receive, _):
            for number in range(50):
                engine.send(GROUP, {"type": "x.y", "n": number})
            assert engine.flush(10)
            got = [receive() for _ in range(50)]

    assert [message["n"] for message in got] == list(range(50))
    assert [message["number"] for message in got] == list(range(50))
    assert len({message["sender"] for message in got}) == 1


@brokers
def test_hosts_may_be_given_in_every_form_that_channels_redis_takes(
    backend: str, make_redis: Any
) -> None:
    server = make_redis(tcp=True)
    for host in (
        ("127.0.0.1", server.port),
        {"address": server.url, "socket_timeout": 5},
        {"host": "127.0.0.1", "port": server.port},
        f"{server.url}?socket_timeout=3",
    ):
        with use_layers(channel_layers(backend, hosts=[host])), losses() as told:
            with engine.waiter(GROUP) as waiter:
                assert waiter.wait(10)
                engine.send(GROUP, {"type": "x.y"})
                assert engine.flush(10)
        assert told == []


@brokers
def test_a_coalesced_message_waits_only_once(
    backend: str, redis_url: str, redis_server: Redis
) -> None:
    with use_layers(channel_layers(backend, redis_url), BROKER_TIMEOUT=30):
        with listening_layer(backend, redis_url, GROUP) as (receive, _):
            redis_server.pause()
            try:
                for number in range(20):
                    engine.send(GROUP, {"type": "x.y", "n": number}, coalesce_key="k")
                engine.send(GROUP, {"type": "x.z"})
            finally:
                redis_server.resume()
            assert engine.flush(10)
            got = [receive() for _ in range(2)]
            while got[-1]["type"] != "x.z":
                got.append(receive())

    # The first may have been under way already when the second came.
    assert 2 <= len(got) <= 3


@brokers
def test_threads_that_send_open_two_connections_not_one_each(
    backend: str, redis_url: str, redis_server: Redis
) -> None:
    with use_layers(channel_layers(backend, redis_url)), redis_server.client() as client:
        before = len(client.client_list())
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            for n in range(300):
                pool.submit(engine.send, f"g{n}", {"type": "x.y"})
        assert engine.flush(10)
        assert len(client.client_list()) - before <= 2


def test_a_message_that_cannot_be_sent_costs_nobody_else_anything(redis_url: str) -> None:
    with use_layers(channel_layers(CORE, redis_url)), losses() as told:
        with listening_layer(CORE, redis_url, GROUP) as (receive, _):
            engine.send(GROUP, {"type": "x.y", "n": object()})
            engine.send("no such group name!", {"type": "x.y"})
            engine.send(GROUP, {"type": "x.y", "n": 1})
            assert engine.flush(10)

            assert receive()["n"] == 1
    assert [(loss["group"], loss["count"]) for loss in told] == [
        (GROUP, 1),
        ("no such group name!", 1),
    ]
    assert told[0]["sender"] is Broker


# A broker that is down, hangs, or is slow.


@brokers
def test_nobody_waits_for_a_hung_broker(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    with hung_server() as url, losses() as told, caplog.at_level(logging.WARNING, "echomq"):
        with use_layers(channel_layers(backend, url), BROKER_TIMEOUT=0.2, PUBLISH_BACKLOG=100):
            with engine.waiter(GROUP) as waiter:
                began = time.monotonic()
                for number in range(1000):
                    engine.send(GROUP, {"type": "x.y", "n": number})
                    engine.notify(GROUP)
                spent = time.monotonic() - began

                assert waiter.is_set()  # this process hears it nevertheless
            assert spent < 2.0
            assert not engine.flush(0.05)
            wait_until(lambda: sum(loss["count"] for loss in told) >= 1000)
            assert engine.flush(10)
    reasons = {type(loss["error"]) for loss in told}
    assert reasons == {TimeoutError, str}  # given up, and refused by the full backlog
    lines = [line for line in caplog.messages if line.startswith("event=publish_failed")]
    assert len(lines) == 1
    assert f"group={GROUP}" in lines[0]


@brokers
def test_a_broker_that_refuses_costs_messages_but_no_errors(backend: str, make_redis: Any) -> None:
    server = make_redis(tcp=True)
    server.stop()
    with use_layers(channel_layers(backend, server.url)), losses() as told:
        engine.send(GROUP, {"type": "x.y"})
        wait_until(lambda: told)
        assert "Connect call failed" in str(told[0]["error"])
        server.restart_empty()
        with listening_layer(backend, server.url, GROUP) as (receive, _):
            engine.send(GROUP, {"type": "x.y", "n": 2})
            assert receive()["n"] == 2
        assert sum(loss["count"] for loss in told) == 1


@brokers
def test_the_first_message_after_a_restart_of_the_broker_arrives(
    backend: str, make_redis: Any
) -> None:
    server = make_redis(tcp=True)
    with use_layers(channel_layers(backend, server.url)), losses() as told:
        engine.send(GROUP, {"type": "x.y", "n": 1})
        assert engine.flush(10)
        server.restart_empty()  # the connection that lies ready is a dead one now
        with listening_layer(backend, server.url, GROUP) as (receive, _):
            engine.send(GROUP, {"type": "x.y", "n": 2})
            assert receive()["n"] == 2
    assert told == []


def test_messages_that_waited_too_long_for_a_dead_broker_are_dropped(make_redis: Any) -> None:
    server = make_redis(tcp=True)
    with use_layers(channel_layers(CORE, server.url), BROKER_TIMEOUT=0.3), losses() as told:
        engine.send(GROUP, {"type": "x.y", "n": 0})
        assert engine.flush(10)
        server.pause()
        for number in range(1, 50):
            engine.send(GROUP, {"type": "x.y", "n": number})
        # One send times out, and takes along all that is as old as it.
        wait_until(lambda: sum(loss["count"] for loss in told) == 49)
        server.resume()
        with listening_layer(CORE, server.url, GROUP) as (receive, _):
            engine.send(GROUP, {"type": "x.y", "n": "new"})
            message = receive()
    assert message["n"] == "new"
    assert message["number"] == 50  # readers see the hole


def test_what_comes_after_a_hole_is_not_merged_into_what_came_before() -> None:
    def merge(waiting: dict[str, Any], new: dict[str, Any]) -> bool:
        waiting["n"] += new["n"]
        return True

    broker = Broker(lambda ring: True)
    broker.attach()
    with use_layers({}, PUBLISH_BACKLOG=2):
        assert broker.send(GROUP, {"type": "x.y", "n": [0]}, merge=merge)
        assert broker.send(GROUP, {"type": "x.y", "n": [1]}, merge=merge)
        assert not broker.send(GROUP, {"type": "x.y", "n": [2]}, merge=merge)
        broker._drain()
        broker._report_refused()
    with use_layers({}, PUBLISH_BACKLOG=10):
        assert broker.send(GROUP, {"type": "x.y", "n": [3]}, merge=merge)
        broker._drain()

    lane = broker._lanes[GROUP]
    assert [(entry.message["n"], entry.lost_after) for entry in lane] == [([0, 1], 1), ([3], 0)]


def test_a_receiver_of_the_signal_that_fails_breaks_nothing(redis_url: str) -> None:
    def fails(**kwargs: Any) -> None:
        raise RuntimeError("broken receiver")

    signals.publish_failed.connect(fails)
    try:
        with use_layers(channel_layers(CORE, redis_url)):
            with listening_layer(CORE, redis_url, GROUP) as (receive, _):
                engine.send(GROUP, {"type": "x.y", "n": object()})
                engine.send(GROUP, {"type": "x.y", "n": 1})
                assert receive()["n"] == 1
    finally:
        signals.publish_failed.disconnect(fails)


def test_flush_inside_the_engine_s_own_thread_does_not_wait_for_itself(redis_url: str) -> None:
    async def flush() -> bool:
        engine.send(GROUP, {"type": "x.y"})
        return engine.flush(10)

    with use_layers(channel_layers(CORE, redis_url)):
        assert engine.submit(flush).result(5) is False


def test_flush_sends_a_wake_up_that_waits_for_its_interval(redis_url: str) -> None:
    with use_layers(channel_layers(CORE, redis_url), NOTIFY_INTERVAL=3600):
        with listening_layer(CORE, redis_url, GROUP) as (receive, _):
            engine.notify(GROUP)
            assert engine.flush(10)
            receive()
            engine.notify(GROUP)
            assert engine.flush(10)
            receive()


def test_settings_that_change_move_the_engine_to_the_new_broker(
    redis_url: str, make_redis: Any
) -> None:
    other = make_redis()
    with use_layers(channel_layers(CORE, redis_url)), engine.waiter(GROUP) as waiter:
        assert waiter.wait(10)
        waiter.clear()
        with use_layers(channel_layers(CORE, other.url)):
            assert waiter.wait(10)  # joined there, or the old link's end was heard first
            with other.client() as client:
                wait_until(lambda: client.zcard(f"asgi:group:{GROUP}") == 1)


@pytest.mark.parametrize("backend", [IN_MEMORY, ECHO])
def test_a_layer_that_ends_at_the_process_needs_no_thread(backend: str) -> None:
    with use_layers(channel_layers(backend)):
        with engine.waiter(GROUP) as waiter:
            engine.notify(GROUP)
            assert waiter.wait(0)
        assert engine.flush(1)
        assert not the_engine._thread.running


def test_a_layer_that_cannot_be_made_fails_no_append(caplog: pytest.LogCaptureFixture) -> None:
    """An append has committed when it tells of it: what is wrong here must not look as if not."""
    with use_layers(channel_layers("no.such.Layer")):
        engine.notify(GROUP)
    assert "event=notify_failed" in caplog.text
