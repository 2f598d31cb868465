"""The worker's side of one process that runs handlers.

It is a new interpreter, as `multiprocessing` starts one by `spawn`: a fork of a process with
threads may hang. Its own session: a Ctrl-C in the terminal reaches the worker, which says
what is to happen. It is nobody's daemon, so that a handler may start processes in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Pipe, wait

from .. import cancel
from ..core.process_messages import (
    Begun,
    Cancel,
    Ended,
    Progress,
    Ready,
    Run,
    Unready,
    decode_report,
    encode,
)
from ..exceptions import ProcessLost
from .process_claim import pack
from .process_main import STOP_SIGNALS
from .running import Asked, RunningJob

LOOK = 1.0
"""Seconds between two looks whether it lives: a process that its handler has forked may hold
its end of the link."""
END = 5.0
"""Seconds that the exit code may take to come, when the link is broken."""

_BEGIN = """\
import json, sys
from multiprocessing.connection import Connection
link, lifeline = Connection(int(sys.argv[1])), int(sys.argv[2])
parent, sys.path[:], sys.argv[:] = json.loads(link.recv_bytes())
from echomq_app.jobs.process_main import main
main(link, lifeline, parent)
"""


class HandlerProcess:
    """A process that runs one handler at a time, each for a thread that waits here."""

    def __init__(self) -> None:
        self._ready = False
        self._number = 0
        self._begun = False
        self.was_idle = False
        """Whether it ended between two handlers: then none of `run` has happened."""
        # Never closed by hand: a callback of a token may come late, and must not write
        # to whatever has the number by then.
        self._woken, self._waker = Pipe(duplex=False)
        self._link, theirs = Pipe()
        # Nothing is ever written to it: that it breaks is the message.
        end_of_lifeline, self._lifeline = Pipe(duplex=False)
        with theirs, end_of_lifeline, _held_back(STOP_SIGNALS):
            given = (theirs.fileno(), end_of_lifeline.fileno())
            self._process = subprocess.Popen(
                [sys.executable, *_flags(), "-c", _BEGIN, *map(str, given), "echomq-handler"],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                start_new_session=True,
            )
        with contextlib.suppress(OSError):  # it has ended already: `run` will say so
            self._link.send_bytes(json.dumps([os.getpid(), sys.path, sys.argv]).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def run(self, job: RunningJob, report: Callable[[float, str], object]) -> Ended | None:
        """Run the handler; return how it ended, or None if it was cancelled before it began.

        Passes on the cancel of the job's token, and calls `report` with the handler's progress.
        Raises `ProcessLost` when the process ends.
        """
        self._number += 1
        self._begun, was_ready = False, self._ready
        forget = job.token.on_cancel(self._wake)
        try:
            return self._converse(job, report)
        except (EOFError, OSError):
            self.was_idle = was_ready and not self._begun
            raise self._lost(job) from None
        finally:
            forget()

    def close(self) -> None:
        """Ask it to end, which it does at once if a handler runs."""
        self._link.close()

    def kill(self) -> None:
        """End it now, whatever it does. Safe from any thread, and again."""
        self._process.kill()

    def reap(self, timeout: float) -> None:
        """Wait for its end; kill it after so many seconds."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _converse(self, job: RunningJob, report: Callable[[float, str], object]) -> Ended | None:
        sent = told = False
        while True:
            found = cancel.check(job.token)
            if found is not None and not sent:
                return None
            if self._ready and not sent:
                sent = True
                self._link.send_bytes(encode(Run(self._number, pack(job.claimed))))
            if found is not None and not told:
                told = True
                who = (job.asked or Asked.CANCEL).value
                order = Cancel(self._number, who, found.reason, found.kind)
                self._link.send_bytes(encode(order))
            ended = self._hear(report)
            if ended is not None:
                return ended

    def _hear(self, report: Callable[[float, str], object]) -> Ended | None:
        """Wait for a message or a cancel; return how the attempt ended, if it has."""
        sources = wait([self._link, self._woken], LOOK)
        if not sources and not self.alive:
            raise EOFError
        if self._woken in sources:
            self._woken.recv_bytes()
        if self._link not in sources:
            return None
        message = decode_report(self._link.recv_bytes())
        if isinstance(message, Ready):
            self._ready = True
        elif isinstance(message, Unready):
            raise ProcessLost(f"A process for handlers couldn't begin: {message.text}")
        elif isinstance(message, Begun):
            self._begun = message.number == self._number
        elif isinstance(message, Progress) and message.number == self._number:
            report(message.fraction, message.note)
        elif isinstance(message, Ended) and message.number == self._number:
            return message
        return None

    def _wake(self) -> None:
        self._waker.send_bytes(b"")

    def _lost(self, job: RunningJob) -> ProcessLost:
        self.reap(END)
        code = self._process.returncode
        how = f"exit code {code}"
        if code < 0:
            with contextlib.suppress(ValueError):
                how = signal.Signals(-code).name
        when = f"during attempt {job.claimed.attempt}" if self._begun else "before it had begun"
        return ProcessLost(
            f"The process {self.pid} of the handler ended {when}, by {how}. SIGKILL is often the "
            "system's, for want of memory; an exit code the handler's own os._exit()."
        )


@contextlib.contextmanager
def _held_back(signals: Collection[signal.Signals]) -> Iterator[None]:
    """Let what this thread starts meanwhile begin with these signals blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _flags() -> list[str]:
    """Return the options that this interpreter was started with and that count there too."""
    return [
        *(f"-W{option}" for option in sys.warnoptions),
        *(["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []),
        *(f"-X{name}" if on is True else f"-X{name}={on}" for name, on in sys._xoptions.items()),
    ]
