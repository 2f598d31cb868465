"""Where a process for handlers begins: before Django is set up. See `handler_process.py`."""

from __future__ import annotations

import fcntl
import os
import signal
import traceback
from multiprocessing.connection import Connection
from types import FrameType

import django

from ..core.payload import storable
from ..core.process_messages import Ready, Unready, encode

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(link: Connection[bytes, bytes], lifeline: int, parent: int) -> None:
    """Set up Django and run handlers until the worker, process `parent`, closes the link.

    `lifeline`: the end of a pipe that breaks when the worker is gone.
    """
    for descriptor in (link.fileno(), lifeline):
        os.set_inheritable(descriptor, False)
    _die_with(lifeline)
    # To end is the worker's decision, also when a signal goes to the whole group. A function
    # instead of SIG_IGN, which programs that a handler starts would inherit.
    for number in STOP_SIGNALS:
        signal.signal(number, _leave_it_to_the_worker)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # they were, from the first moment
    try:
        django.setup()
        from .process_child import ProcessChild  # needs the models

        child = ProcessChild(link, parent)
    except BaseException as error:
        text = "".join(traceback.format_exception_only(error)).strip()
        link.send_bytes(encode(Unready(storable(text))))
        raise
    link.send_bytes(encode(Ready()))
    child.serve()


def _die_with(lifeline: int) -> None:
    """Have the system end this process when the pipe breaks.

    The listener would do it, too, but not while a handler keeps the interpreter's lock: a
    regular expression may for hours. SIGIO ends a process, unless it says otherwise; where
    the system has other habits (macOS), the listener is all.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)


def _leave_it_to_the_worker(number: int, frame: FrameType | None) -> None:
    pass
