"""Writers in processes of their own, which start at one moment and are timed.

Processes, not threads: threads of one process share the interpreter's lock, and the
benchmark would measure that. A process stays, with its connections, for all its loads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from types import TracebackType
from typing import Self

_SPAWN = multiprocessing.get_context("spawn")
_STUCK = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a writer does: whose append, how many records each, to one stream or its own."""

    contender: str
    batch: int = 1
    shared: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where a writer sits: its number among how many, and the database."""

    number: int
    size: int
    dsn: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """What one writer did, on the machine's monotonic clock. `counts` by part of the time."""

    begun: float
    ended: float
    counts: list[int]


class WriterFailed(Exception):
    """A writer's process raised; the message is its traceback."""


class Crew:
    """`size` writing processes, for the length of the block."""

    def __init__(self, size: int, dsn: str) -> None:
        # Kept: a starting process looks it up by name, which goes with the last reference here.
        self._barrier = _SPAWN.Barrier(size)
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(size):
            ours, theirs = _SPAWN.Pipe()
            seat = Seat(number=number, size=size, dsn=dsn)
            process = _SPAWN.Process(target=_serve, args=(theirs, self._barrier, seat), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # the writer's recv ends, and so does it
        for process in self._processes:
            process.join(_STUCK)
            if process.is_alive():
                process.kill()

    def run(self, load: Load, seconds: float, part: float | None = None) -> list[Timed]:
        """Have all write for so long; `part` is the length of what `counts` counts."""
        for pipe in self._pipes:
            pipe.send((load, seconds, part or seconds))
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(seconds + _STUCK):
                raise WriterFailed(f"A writer of {load} did not answer.")
            answers.append(pipe.recv())
        for answer in answers:
            if isinstance(answer, str):
                raise WriterFailed(answer)
        return answers

    def rate(self, load: Load, seconds: float) -> float:
        """Return records per second of all together, from the first start to the last end."""
        timed = self.run(load, seconds)
        elapsed = max(one.ended for one in timed) - min(one.begun for one in timed)
        return sum(sum(one.counts) for one in timed) / elapsed


def _serve(pipe: Connection, barrier: Barrier, seat: Seat) -> None:
    """Do loads as they come, until the other end of the pipe is closed."""
    import django

    django.setup()
    from .writers import WRITERS

    writers: dict[Load, Callable[[], int]] = {}
    with contextlib.ExitStack() as stack:
        while True:
            try:
                load, seconds, part = pipe.recv()
            except EOFError:
                return
            try:
                if load not in writers:
                    write = stack.enter_context(WRITERS[load.contender](load, seat))
                    writers[load] = write
                    _time(write, seconds / 5, seconds)  # connected, prepared, compiled
                barrier.wait(_STUCK)
                pipe.send(_time(writers[load], seconds, part))
            except Exception:
                barrier.abort()
                pipe.send(traceback.format_exc())


def _time(write: Callable[[], int], seconds: float, part: float) -> Timed:
    counts = [0] * math.ceil(seconds / part)
    begun = now = time.monotonic()
    while now - begun < seconds:
        counts[int((now - begun) / part)] += write()
        now = time.monotonic()
    return Timed(begun=begun, ended=now, counts=counts)
