"""The engine and the life of a process: exits and forks, in real processes."""

from __future__ import annotations

import json
import time

import pytest

from tests.layers import (
    CORE,
    IN_MEMORY,
    PUBSUB,
    channel_layers,
    hung_server,
    run_program,
    use_layers,
)
from tests.servers import Redis
from tests.wait import wait_until

brokers = pytest.mark.parametrize("backend", [CORE, PUBSUB])

# Descriptors of this process that lead to the TCP port in argv[2].
LINKS = """
import socket
def links():
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                if copy.family == socket.AF_INET and copy.getpeername()[1] == int(sys.argv[2]):
                    found.append((int(name), copy.getsockname()[1]))
        except OSError:
            pass
    return sorted(found)
"""


def port(url: str) -> str:
    return url.rsplit(":", 1)[1].split("/", maxsplit=1)[0]


@brokers
def test_an_exit_sends_what_waits_and_closes_what_is_open(backend: str, make_redis: object) -> None:
    server = make_redis(tcp=True)  # type: ignore[operator]
    layers = channel_layers(backend, server.url)
    with use_layers(layers), server.client() as client:
        before = len(client.client_list())
        pubsub = client.pubsub()
        pubsub.subscribe("asgi__group__g")
        done = run_program(
            """
with engine.waiter("g") as waiter:
    assert waiter.wait(20)
    engine.send("other", {"type": "x.y"})
    assert engine.flush(20)
    for n in range(100):
        engine.send("g", {"type": "x.y", "n": n})
""",
            layers,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        wait_until(lambda: len(client.client_list()) == before + 1)
        if backend == PUBSUB:
            messages = [pubsub.get_message(timeout=1) for _ in range(101)]
            assert sum(m is not None and m["type"] == "message" for m in messages) == 100
        pubsub.close()


@pytest.mark.parametrize(
    ("backend", "program"),
    [
        (CORE, 'events.publish("q", "started", new_job_id())'),
        (PUBSUB, 'events.publish("q", "started", new_job_id())'),
        (CORE, 'engine.notify("g"); engine.notify("g")'),
        (PUBSUB, 'waiter = engine.waiter("g").__enter__(); waiter.wait(0.1)'),
        (CORE, 'engine.submit(lambda: __import__("asyncio").sleep(3600))'),
    ],
)
def test_a_process_with_a_hung_broker_ends_at_once_and_silently(backend: str, program: str) -> None:
    with hung_server() as url:
        done = run_program(
            program + "; print(time.monotonic())",  # one clock for all processes
            channel_layers(backend, url),
        )
        spent = time.monotonic() - float(done.stdout)

    assert (done.returncode, done.stderr) == (0, "")
    assert spent < 2.0  # BROKER_TIMEOUT would be 5


@pytest.mark.parametrize("how", ["sys.exit(3)", "raise SystemExit(3)", "os._exit(3)"])
def test_however_a_process_ends_no_thread_holds_it(
    how: str, redis_url: str, redis_server: Redis
) -> None:
    program = f"""
engine.send("g", {{"type": "x.y"}})
waiter = engine.waiter("g").__enter__()
assert waiter.wait(20)
{how}
"""
    with redis_server.client() as client:
        before = len(client.client_list())
        done = run_program(program, channel_layers(CORE, redis_url))
        wait_until(lambda: len(client.client_list()) == before)

    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
@brokers
def test_a_process_whose_broker_has_gone_or_hangs_ends_silently(
    backend: str, how: str, make_redis: object
) -> None:
    server = make_redis(tcp=True)  # type: ignore[operator]
    program = """
import logging, signal
logging.disable()
waiter = engine.waiter("g").__enter__()
assert waiter.wait(20)
engine.send("g", {"type": "x.y"})
assert engine.flush(20)
waiter.clear()
os.kill(int(sys.argv[2]), getattr(signal, sys.argv[3]))
time.sleep(0.3)  # into the attempts to connect again
print(time.monotonic())
"""
    layers = channel_layers(backend, server.url)
    done = run_program(program, layers, str(server.process.pid), how)
    spent = time.monotonic() - float(done.stdout)
    server.resume()

    assert (done.returncode, done.stderr) == (0, "")
    assert spent < 3.0


def test_publishing_at_exit_opens_no_connection_and_says_nothing(
    redis_url: str, redis_server: Redis
) -> None:
    program = """
import atexit
def late():
    engine.send("g", {"type": "x.y"})
    engine.notify("g")
    print(engine.flush(0.1))
    future = engine.submit(lambda: None)
    print(type(future.exception()).__name__)
import atexit
atexit._run_exitfuncs()  # the engine's own handler has run by now
late()
"""
    with redis_server.client() as client:
        before = client.info("stats")["total_connections_received"]
        done = run_program(program, channel_layers(CORE, redis_url))
        assert client.info("stats")["total_connections_received"] == before

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "True\nEngineStopped\n"


@brokers
def test_a_forked_child_has_connections_of_its_own_and_the_parent_keeps_its_own(
    backend: str, make_redis: object
) -> None:
    server = make_redis(tcp=True)  # type: ignore[operator]
    program = (
        LINKS
        + """
waiter = engine.waiter("w").__enter__()
assert waiter.wait(20)
engine.send("g", {"type": "x.y"})
assert engine.flush(20)
of_parent = links()
assert len(of_parent) >= 2, of_parent
if (pid := os.fork()) == 0:
    if links():
        os._exit(10)                                    # inherited and still open
    if threading.active_count() != 1:
        os._exit(11)
    engine.send("g", {"type": "x.y", "from": "child"})
    if not engine.flush(20):
        os._exit(12)
    own = links()
    if not own or {local for _, local in own} & {local for _, local in of_parent}:
        os._exit(13)
    with engine.waiter("w2") as second:
        if not second.wait(20):
            os._exit(14)
    engine.notify("w")                                  # the parent must hear that
    import gc
    gc.collect()                                        # nothing of the parent may go here
    sys.exit(0)
waiter.clear()
_, status = os.waitpid(pid, 0)
print("child", os.waitstatus_to_exitcode(status))
print("heard", waiter.wait(20))
waiter.clear()
assert links() == of_parent
engine.send("g", {"type": "x.y", "from": "parent"})
print("sent", engine.flush(20))
"""
    )
    done = run_program(program, channel_layers(backend, server.url), port(server.url))

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "child 0\nheard True\nsent True\n"


def test_a_child_does_not_send_what_was_the_parent_s_to_send(
    redis_url: str, redis_server: Redis
) -> None:
    program = """
import signal
redis_pid = int(sys.argv[2])
engine.send("g", {"type": "x.y", "n": 0})
assert engine.flush(20)
os.kill(redis_pid, signal.SIGSTOP)
for n in range(1, 10):
    engine.send("g", {"type": "x.y", "n": n})
if (pid := os.fork()) == 0:
    engine.send("g", {"type": "x.y", "n": "child"})
    os.kill(redis_pid, signal.SIGCONT)
    sys.exit(0 if engine.flush(20) else 1)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status) or not engine.flush(20))
"""
    layers = channel_layers(PUBSUB, redis_url, serializer_format="json")
    with redis_server.client() as client:
        pubsub = client.pubsub()
        pubsub.subscribe("asgi__group__g")
        assert pubsub.get_message(timeout=5) is not None
        done = run_program(program, layers, str(redis_server.process.pid))
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        got = []
        while (message := pubsub.get_message(timeout=1)) is not None:
            got.append(json.loads(message["data"]))
        pubsub.close()

    assert [m["n"] for m in got if m["n"] != "child"] == list(range(10))
    assert [m["n"] for m in got].count("child") == 1
    assert len({m["sender"] for m in got}) == 2


@brokers
def test_a_forked_child_with_a_hung_broker_exits_at_once(backend: str) -> None:
    program = """
engine.send("g", {"type": "x.y"})
waiter = engine.waiter("w").__enter__()
waiter.wait(0.2)
began = time.monotonic()
if (pid := os.fork()) == 0:
    events.publish("q", "started", new_job_id())
    sys.exit(0)
_, status = os.waitpid(pid, 0)
spent = time.monotonic() - began
assert spent < 2.5, spent
sys.exit(os.waitstatus_to_exitcode(status))
"""
    with hung_server() as url:
        done = run_program(program, channel_layers(backend, url))

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_fork_in_the_midst_of_everything(redis_url: str) -> None:
    # The first call imports the layer: a fork in the midst of an import hangs any child.
    program = """
engine.notify("g0")
assert engine.flush(20)
stop = threading.Event()
def busy(n):
    while not stop.is_set():
        engine.notify(f"g{n}")
        engine.send(f"g{n}", {"type": "x.y"})
        with engine.waiter(f"w{n}"):
            pass
threads = [threading.Thread(target=busy, args=(n,)) for n in range(4)]
for thread in threads:
    thread.start()
failed = 0
for _ in range(12):
    if (pid := os.fork()) == 0:
        engine.notify("g0")
        engine.send("g0", {"type": "x.y"})
        os._exit(0 if engine.flush(20) else 1)
    failed += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0
stop.set()
for thread in threads:
    thread.join()
print("failed", failed, engine.flush(20))
"""
    done = run_program(program, channel_layers(PUBSUB, redis_url), PUBLISH_BACKLOG=1000)

    assert (done.returncode, done.stdout) == (0, "failed 0 True\n"), done.stderr
    # Python 3.12 warns of every fork with threads, ours or the program's own.
    assert "Traceback" not in done.stderr


def test_a_forked_child_finalises_nothing_of_its_parents_loop() -> None:
    """A task would report that it was destroyed, a coroutine run its `finally`, a link close."""
    program = """
from echomq_app.engine.loop_thread import LoopThread

class Belonging:
    def __del__(self, write=os.write):
        write(1, b"finalised\\n")

async def stopped():
    pass

thread = LoopThread("parent", on_start=lambda: None, on_stop=stopped)
thread.loop()
belongings = [Belonging()]
if (pid := os.fork()) == 0:
    thread.after_fork_in_child(belongings.pop())
    os.write(1, b"forgotten\\n")
    sys.exit(0)
os.waitpid(pid, 0)
os.write(1, b"child ended\\n")
belongings.clear()
thread.close(20)
"""
    done = run_program(program, channel_layers(IN_MEMORY, ""))

    assert done.stdout == "forgotten\nchild ended\nfinalised\n", done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("backend", [IN_MEMORY, CORE])
def test_importing_the_engine_starts_nothing(backend: str) -> None:
    with hung_server() as url:
        done = run_program(
            "print(threading.active_count())",
            channel_layers(backend, "" if backend == IN_MEMORY else url),
        )

    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
