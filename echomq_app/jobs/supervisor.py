"""`--processes N`: N workers as processes of their own, watched and started again.

The parent does nothing else, and uses no database: it has its workers stop when it is asked to,
and waits. A worker
that ended in good order (`--max-jobs`, `--max-rss`) is replaced at once; one that crashed, or
couldn't start, after a pause that grows while it goes on. With `--drain`, who has ended isn't
replaced.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence

from ..core.retry import full_jitter
from .stopping import stop_signals
from .wakeup import Wakeup

logger = logging.getLogger("echomq.jobs")

LOOK = 0.2
"""Seconds between two looks at the children."""
STABLE = 60.0
"""A worker that ran so long has no failures to its name."""
PAUSE, LONGEST_PAUSE = 0.5, 30.0
PARENT = "ECHOMQ_SUPERVISOR"
"""The environment's name for the parent's pid: a worker whose parent is gone stops."""


class _Seat:
    """The place of one worker: its process, or when to start the next."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.start_at: float | None = 0.0
        self.failures = 0


class Supervisor:
    """Runs `command` in `processes` children until told to stop."""

    def __init__(self, command: Sequence[str], processes: int, *, again: bool = True) -> None:
        """`again`: whether one that ended in good order is replaced."""
        self._command = list(command)
        self._seats = [_Seat() for _ in range(processes)]
        self._again = again
        self._stop = Wakeup()
        self._at_once = False
        self._worst = 0

    def run(self) -> int:
        """Supervise; return the exit code: the worst of those that ended for good."""
        with stop_signals(self.stop, self._ended_at_once):
            while self._step():
                if self._stop.closed:
                    time.sleep(LOOK / 4)  # a closed one doesn't wait
                else:
                    self._stop.wait(LOOK)
        return self._worst

    def _step(self) -> bool:
        """Look at every child once; tell whether to go on."""
        for seat in self._seats:
            if seat.process is not None:
                code = seat.process.poll()
                if code is not None:
                    self._ended(seat, code)
            due = seat.start_at is not None and time.monotonic() >= seat.start_at
            if seat.process is None and due and not self._stop.closed:
                self._start(seat)
        running = any(seat.process is not None for seat in self._seats)
        waiting = any(seat.start_at is not None for seat in self._seats)
        return running or (waiting and not self._stop.closed)

    def _start(self, seat: _Seat) -> None:
        # A group of its own: a Ctrl-C in the terminal reaches the parent, which passes it on.
        env = {**os.environ, PARENT: str(os.getpid())}
        seat.process = subprocess.Popen(self._command, start_new_session=True, env=env)
        seat.started_at = time.monotonic()
        logger.info("event=worker_process_started pid=%d", seat.process.pid)
        if self._stop.closed:  # asked in this moment
            seat.process.send_signal(signal.SIGTERM)

    def _ended(self, seat: _Seat, code: int) -> None:
        pid = seat.process.pid if seat.process is not None else 0
        seat.process = None
        if self._stop.closed or (code == 0 and not self._again):
            seat.start_at = None
            if code == -signal.SIGTERM and not self._at_once:
                code = 0  # it had begun nothing yet: a worker receives this signal itself
            self._worst = max(self._worst, code if code >= 0 else 128 - code)
            return
        if code == 0:
            seat.failures, seat.start_at = 0, 0.0
            return
        lived = time.monotonic() - seat.started_at
        seat.failures = 1 if lived > STABLE else seat.failures + 1
        pause = full_jitter(seat.failures, base=PAUSE, cap=LONGEST_PAUSE, random=random.random)
        seat.start_at = time.monotonic() + pause
        logger.error(
            "event=worker_process_failed pid=%d code=%d lived=%.1f again_in=%.1f",
            pid,
            code,
            lived,
            pause,
        )

    def stop(self) -> None:
        """Have the workers stop gracefully, and start none."""
        self._stop.close()
        self._pass_on(signal.SIGTERM)

    def _ended_at_once(self, number: int) -> None:
        """End the workers by the signal that does, whatever this process has received."""
        self._stop.close()
        self._at_once = True
        self._pass_on(signal.SIGQUIT)

    def _pass_on(self, number: int) -> None:
        for seat in self._seats:
            if seat.process is not None and seat.process.poll() is None:
                seat.process.send_signal(number)


def child_command(argv: Sequence[str], option: str = "--processes") -> list[str]:
    """Return this process's command without the option: what a child runs."""
    command: list[str] = []
    words = iter(argv)
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            command.append(word)
    return command
