"""The cancel token: first reason, identity, deadlines, and no way to deadlock or leak."""

from __future__ import annotations

import asyncio
import copy
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from echomq_app import cancel, exceptions
from echomq_app.core.deadlines import Deadlines
from tests.wait import wait_until


def test_a_fresh_token_says_nothing() -> None:
    token = cancel.new()

    assert cancel.check(token) is None
    cancel.check_or_raise(token)
    token.raise_if_cancelled()
    assert not token.cancelled
    assert token.reason is None


def test_the_first_reason_stays_and_a_check_consumes_nothing() -> None:
    token = cancel.new()

    cancel.cancel(token, "first")
    cancel.cancel(token, "second")
    cancel.cancel(token)

    for _ in range(3):
        assert cancel.check(token) == cancel.Cancelled("first")
    assert token.reason == "first"


def test_a_cancel_without_a_reason_is_a_cancel() -> None:
    token = cancel.new()

    token.cancel()

    assert cancel.check(token) == cancel.Cancelled(None)
    assert bool(cancel.check(token))
    assert token.cancelled
    token.cancel("too late")
    assert token.reason is None


def test_the_raising_checks_raise_the_app_s_own_error_with_the_reason() -> None:
    token = cancel.new()
    token.cancel("shutdown")

    assert cancel.JobCancelled is exceptions.JobCancelled
    with pytest.raises(cancel.JobCancelled, match="shutdown") as caught:
        cancel.check_or_raise(token)
    assert caught.value.reason == "shutdown"
    with pytest.raises(cancel.JobCancelled):
        token.raise_if_cancelled()


@pytest.mark.parametrize("stranger", [None, "JOB…", 7, object(), threading.Event()])
def test_cancelling_what_is_no_token_is_nobody_s_error(stranger: object) -> None:
    cancel.cancel(stranger, "why")


def test_a_handler_that_never_checks_completes_normally_sync_and_async() -> None:
    async def handler(token: cancel.CancelToken) -> str:
        token.cancel("asked in vain")
        await asyncio.sleep(0)
        return "done"

    token = cancel.new()

    assert asyncio.run(handler(token)) == "done"
    assert token.cancelled


def test_a_token_only_catches_its_own_cancellation() -> None:
    mine, other = cancel.new(), cancel.new()

    other.cancel("not mine")

    assert cancel.check(mine) is None


def test_a_token_has_an_identity_and_no_value() -> None:
    one, two = cancel.new(), cancel.new()

    assert one != two
    assert len({one, two, one}) == 2
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"jobs\.control\.cancel"):
            act(one)
    assert "live" in repr(one)
    one.cancel("x")
    assert "cancelled" in repr(one)
    assert "'x'" in repr(one)


# Threads.


def test_of_many_threads_exactly_one_reason_wins_and_all_see_it() -> None:
    for _ in range(50):
        token = cancel.new()
        barrier = threading.Barrier(8)
        seen: list[cancel.Cancelled | None] = []
        called: list[str] = []
        token.on_cancel(lambda called=called: called.append("once"))  # type: ignore[misc]

        def race(
            name: str,
            token: cancel.CancelToken = token,
            barrier: threading.Barrier = barrier,
            seen: list[cancel.Cancelled | None] = seen,
        ) -> None:
            barrier.wait()
            token.cancel(name)
            seen.append(cancel.check(token))

        threads = [threading.Thread(target=race, args=(str(n),)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(set(seen)) == 1
        assert seen[0] is cancel.check(token)
        assert called == ["once"]


def test_wait_returns_when_another_thread_cancels() -> None:
    token = cancel.new()
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(token.wait(30))) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(token._wakers) == 3)

    token.cancel()
    for thread in threads:
        thread.join(10)

    assert answers == [True, True, True]


def test_wait_times_out_and_leaves_nothing_behind() -> None:
    token = cancel.new()
    began = time.monotonic()

    assert token.wait(0.05) is False
    assert time.monotonic() - began >= 0.05
    assert token.wait(0) is False
    assert token.wait(-1) is False
    assert len(token._wakers) == 0
    token.cancel()
    assert token.wait(0) is True
    assert token.wait() is True


# Asyncio.


async def test_wait_async_returns_the_cancel_of_another_thread() -> None:
    token = cancel.new()
    waiting = [asyncio.create_task(token.wait_async()) for _ in range(3)]
    await asyncio.sleep(0)

    thread = threading.Thread(target=token.cancel, args=("from afar",))
    thread.start()
    answers = await asyncio.wait_for(asyncio.gather(*waiting), 10)
    thread.join()

    assert answers == [cancel.Cancelled("from afar")] * 3
    assert await token.wait_async() == cancel.Cancelled("from afar")


async def test_a_cancelled_wait_async_leaves_nothing_behind() -> None:
    token = cancel.new()
    task = asyncio.create_task(token.wait_async())
    await asyncio.sleep(0)
    assert len(token._wakers) == 1

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert len(token._wakers) == 0


def test_a_loop_that_was_closed_while_waiting_is_no_error() -> None:
    token = cancel.new()
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    token.on_cancel(lambda: loop.call_soon_threadsafe(future.set_result, None))
    loop.close()

    token.cancel()  # RuntimeError: Event loop is closed; logged, not raised

    assert token.cancelled


# Callbacks.


def test_callbacks_run_once_newest_first_and_may_be_forgotten() -> None:
    token = cancel.new()
    ran: list[str] = []
    token.on_cancel(lambda: ran.append("a"))
    forget = token.on_cancel(lambda: ran.append("b"))
    token.on_cancel(lambda: ran.append("c"))

    forget()
    forget()
    token.cancel()
    token.cancel()

    assert ran == ["c", "a"]


def test_a_callback_on_a_cancelled_token_runs_here_and_now() -> None:
    token = cancel.new()
    token.cancel("gone")
    ran: list[str | None] = []

    forget = token.on_cancel(lambda: ran.append(token.reason))

    assert ran == ["gone"]
    forget()


def test_a_failing_callback_is_logged_and_the_others_run(caplog: pytest.LogCaptureFixture) -> None:
    token = cancel.new()
    ran: list[str] = []

    def fails() -> None:
        raise RuntimeError("broken callback")

    token.on_cancel(lambda: ran.append("a"))
    token.on_cancel(fails)
    with caplog.at_level(logging.ERROR, logger="echomq"):
        token.cancel()
        token.on_cancel(fails)

    assert ran == ["a"]
    assert caplog.text.count("broken callback") >= 2


def test_a_callback_sees_the_whole_tree_cancelled() -> None:
    token = cancel.new()
    child = token.child()
    seen: list[bool] = []
    token.on_cancel(lambda: seen.append(child.cancelled))

    token.cancel()

    assert seen == [True]


def test_registering_and_cancelling_at_once_runs_each_callback_exactly_once() -> None:
    for _ in range(200):
        token = cancel.new()
        barrier = threading.Barrier(2)
        ran: list[int] = []

        def register(
            token: cancel.CancelToken = token,
            barrier: threading.Barrier = barrier,
            ran: list[int] = ran,
        ) -> None:
            barrier.wait()
            for number in range(20):
                token.on_cancel(lambda number=number: ran.append(number))  # type: ignore[misc]

        thread = threading.Thread(target=register)
        thread.start()
        barrier.wait()
        token.cancel()
        thread.join()

        assert sorted(ran) == list(range(20))


# Children.


def test_a_cancel_goes_down_and_never_up() -> None:
    root = cancel.new()
    left, right = root.child(), root.child()
    below = left.child()

    left.cancel("left only")

    assert cancel.check(below) == cancel.Cancelled("left only")
    assert cancel.check(root) is None
    assert cancel.check(right) is None
    root.cancel("all")
    assert right.reason == "all"
    assert left.reason == "left only"


def test_a_child_of_a_cancelled_token_is_born_cancelled() -> None:
    root = cancel.new()
    root.cancel("before")

    assert root.child().reason == "before"
    assert root.child().child().wait(0)


def test_a_grandchild_hears_of_it_though_nobody_keeps_the_child() -> None:
    root = cancel.new()
    grandchild = root.child().child()
    gc.collect()

    root.cancel("through the middle")

    assert grandchild.reason == "through the middle"


def test_ten_thousand_generations_are_no_recursion() -> None:
    root = cancel.new()
    token = root
    for _ in range(10_000):
        token = token.child()

    root.cancel("deep")

    assert token.reason == "deep"
    del token  # nor may freeing the chain recurse in C


def test_dropped_children_and_waits_leave_nothing_in_their_parent() -> None:
    root = cancel.new()
    for _ in range(1000):
        root.child()
        root.with_deadline(3600)
    kept = root.child()
    gc.collect()

    assert len(root._children) == 1
    reference = weakref.ref(kept)
    del kept
    gc.collect()
    assert reference() is None
    assert len(root._children) == 0


def test_cancel_and_child_at_once_leave_no_child_alone() -> None:
    for _ in range(200):
        root = cancel.new()
        barrier = threading.Barrier(2)
        children: list[cancel.CancelToken] = []

        def breed(
            root: cancel.CancelToken = root,
            barrier: threading.Barrier = barrier,
            children: list[cancel.CancelToken] = children,
        ) -> None:
            barrier.wait()
            children.extend(root.child() for _ in range(20))

        thread = threading.Thread(target=breed)
        thread.start()
        barrier.wait()
        root.cancel("now")
        thread.join()

        assert all(child.cancelled for child in children)


# Deadlines.


def test_a_deadline_cancels_with_a_reason_and_only_the_child() -> None:
    root = cancel.new()
    token = root.with_deadline(0.05)
    named = root.with_deadline(0.05, reason="timeout of the job")

    assert token.wait(10)
    assert named.wait(10)

    assert token.reason == "deadline of 0.05 s passed"
    assert named.reason == "timeout of the job"
    assert cancel.check(root) is None


def test_an_earlier_deadline_overtakes_a_later_one_that_is_waited_for() -> None:
    # A thread of its own: the shared one may sleep for a deadline of another test.
    deadlines = Deadlines()
    late, early = cancel.new(), cancel.new()
    deadlines.add(60, late, "late")
    wait_until(lambda: not deadlines._new)
    deadlines.add(0.02, early, "early")

    assert early.wait(10)
    assert not late.cancelled


def test_a_deadline_that_passed_already_or_never_comes() -> None:
    root = cancel.new()

    assert root.with_deadline(0).cancelled
    assert root.with_deadline(-5).cancelled
    assert not root.with_deadline(float("inf")).wait(0.01)
    assert not root.with_deadline(1e12).wait(0.01)
    with pytest.raises(ValueError, match="NaN"):
        root.with_deadline(float("nan"))


def test_a_deadline_runs_callbacks_and_reaches_children_and_tasks() -> None:
    token = cancel.new().with_deadline(0.03)
    below = token.child()
    ran = threading.Event()
    token.on_cancel(ran.set)

    answer = asyncio.run(asyncio.wait_for(below.wait_async(), 10))

    assert answer.reason == "deadline of 0.03 s passed"
    assert ran.wait(10)


def test_all_deadlines_share_one_thread_and_dropped_ones_are_swept() -> None:
    root = cancel.new()
    deadlines = cancel._deadlines
    before = set(threading.enumerate())  # a test above has one of its own
    for _ in range(5000):
        root.with_deadline(3600)
    wait_until(lambda: len(deadlines._heap) + len(deadlines._new) < 2500)

    thread = deadlines._thread
    assert thread is not None and thread.is_alive() and thread.daemon
    started = set(threading.enumerate()) - before
    assert {other for other in started if "deadline" in other.name} <= {thread}


def test_tokens_dropped_while_garbage_is_collected_do_not_crash_python() -> None:
    # What core/deadlines.py says of CPython 3.11. A collection per allocation, each with
    # a pause in which the thread sweeps; and tuples are kept, for it takes a new one.
    program = """
import gc, time
from echomq_app import cancel
gc.callbacks.append(lambda phase, info: time.sleep(0))
gc.set_threshold(1)
root, kept = cancel.new(), []
for n in range(2000):
    kept.append((n, n, n, n))
    root.with_deadline(3600)
print(len(root._children))
"""
    done = run_python(program)

    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_a_token_has_no_weak_reference_with_a_callback() -> None:
    token = cancel.new().with_deadline(3600)

    assert [reference.__callback__ for reference in weakref.getweakrefs(token)] == [None]


def test_a_forked_child_keeps_its_deadlines_and_its_tokens() -> None:
    program = """
import os, sys
from echomq_app import cancel
root = cancel.new()
before = root.with_deadline(0.2)
late = root.with_deadline(3600)
if (pid := os.fork()) == 0:
    after = root.with_deadline(0.1)
    ok = before.wait(20) and after.wait(20) and not late.cancelled and not root.cancelled
    sys.exit(0 if ok else 1)
_, status = os.waitpid(pid, 0)
assert before.wait(20)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = run_python(program)

    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_a_process_with_a_pending_deadline_ends_at_once_and_silently() -> None:
    began = time.monotonic()

    done = run_python(
        "from echomq_app import cancel; t = cancel.new().with_deadline(3600); print(t.cancelled)"
    )

    assert done.returncode == 0
    assert (done.stdout, done.stderr) == ("False\n", "")
    assert time.monotonic() - began < 30


# Signal handlers: `threading.Event` deadlocks here (bpo-41149), a token must not.


def test_a_signal_handler_may_cancel_whatever_it_interrupts() -> None:
    program = """
import itertools, signal, sys
from echomq_app import cancel

rounds = 0
def handler(signum, frame):
    global rounds
    rounds += 1
    current.cancel(f"signal {rounds}")

signal.signal(signal.SIGALRM, handler)
current = root = cancel.new()
signal.setitimer(signal.ITIMER_REAL, 0.0003, 0.0003)
while rounds < 1500:
    current = root = cancel.new()
    for _ in range(10):
        child = current.child()
        forget = child.on_cancel(lambda: None)
        cancel.check(current)
        child.wait(0.0001)
        forget()
        child.with_deadline(60)
    current.cancel("the program")
    assert child.cancelled and cancel.check(current) is cancel.check(current)
signal.setitimer(signal.ITIMER_REAL, 0)
print("done")
"""
    done = run_python(program, timeout=60)

    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_signal_wakes_the_wait_that_it_interrupts() -> None:
    program = """
import os, signal, threading, time
from echomq_app import cancel
token = cancel.new()
signal.signal(signal.SIGTERM, lambda *args: token.cancel("shutdown"))
def kill():
    while not len(token._wakers):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=kill).start()
print(token.wait(30), token.reason)
"""
    began = time.monotonic()

    done = run_python(program)

    assert (done.stdout, done.stderr) == ("True shutdown\n", "")
    assert time.monotonic() - began < 20


async def test_a_signal_handler_may_cancel_a_token_that_this_loop_waits_for() -> None:
    token = cancel.new()
    previous = signal.signal(signal.SIGUSR1, lambda *args: token.cancel("signal"))
    try:
        task = asyncio.create_task(token.wait_async())
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGUSR1)

        assert (await asyncio.wait_for(task, 10)).reason == "signal"
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_cancel_needs_no_django() -> None:
    done = run_python(
        "import sys\nfrom echomq_app import cancel\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('django', 'channels')])"
    )

    assert done.stdout == "[]\n"


def run_python(program: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
