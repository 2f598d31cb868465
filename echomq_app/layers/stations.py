"""The stations of this process: one per configuration; their exit and their fork."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (its own exit hook has to come after ours)
import contextlib
import multiprocessing
import os
import threading
import time
from typing import Any

from django.core.signals import setting_changed

from .. import engine
from ..conf import current
from ..engine.loop_thread import bury
from .options import LayerOptions
from .station import Station

NO_HOPE = 0.1
"""Seconds for the goodbye when the drain before it has failed."""

_stations: dict[str, Station] = {}
_lock = threading.Lock()


def station(options: LayerOptions) -> Station:
    """Return this process's station for these options."""
    key = options.key()
    with _lock:
        found = _stations.get(key)
        if found is None:
            found = _stations[key] = Station(options)
        return found


def drain(timeout: float | None = None) -> bool:
    """Wait until all other nodes have what this process has sent; tell whether they do.

    At most `timeout` seconds (ECHOMQ["FLUSH_DEADLINE"] by default). Needed only before an
    end that runs no exit handlers, such as `os._exit`. Blocks: not for async code.
    """
    deadline = time.monotonic() + (current().FLUSH_DEADLINE if timeout is None else timeout)
    results = [one.drain(max(0.0, deadline - time.monotonic())) for one in _all()]
    return all(results)


def leave_all(timeout: float | None = None) -> None:
    """Drain and say goodbye, for all stations. The next use of a layer starts afresh."""
    deadline = time.monotonic() + (current().FLUSH_DEADLINE if timeout is None else timeout)
    stations = _all()
    if stations:
        engine.flush(deadline - time.monotonic())
    for one in stations:
        one.leave(max(0.1, deadline - time.monotonic()))


def forget_all() -> None:
    """Make new stations for the layers that are made from now on."""
    with _lock:
        _stations.clear()


def _all() -> list[Station]:
    with _lock:
        return list(_stations.values())


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    for one in _stations.values():
        bury(one.belongings())
        one.begin()


def _settings_changed(*, setting: str, **kwargs: Any) -> None:
    """The layers are made anew."""
    if setting == "CHANNEL_LAYERS":
        forget_all()


class _Exit:
    """Brings what was sent to the other nodes, in two steps, before the process ends.

    At the end of the main thread names can still be resolved and connections opened, which
    in an atexit handler is too late (it only seems to work with 127.0.0.1). But other
    threads may go on and send for as long as they like, so that is no time for a goodbye:
    all is delivered, and the links stay open. The goodbye comes at exit, when only daemon
    threads are left, over the same links. A child of multiprocessing runs no atexit
    handlers, so there it comes at once.
    """

    def __init__(self) -> None:
        self._reaches = True

    def register(self) -> None:
        # concurrent.futures hooks in at the same place.
        register = getattr(threading, "_register_atexit", atexit.register)
        with contextlib.suppress(RuntimeError):  # imported by a thread that outlived the main one
            register(self.main_thread_ends)
        atexit.register(self.process_ends)

    def main_thread_ends(self) -> None:
        if multiprocessing.parent_process() is not None:
            leave_all()
        elif _all():
            deadline = time.monotonic() + current().FLUSH_DEADLINE
            engine.flush(current().FLUSH_DEADLINE)  # what the feed still has goes this way too
            self._reaches = drain(max(0.0, deadline - time.monotonic()))

    def process_ends(self) -> None:
        # Nobody waits twice for a broker that doesn't answer.
        leave_all(None if self._reaches else NO_HOPE)


_Exit().register()
os.register_at_fork(after_in_child=_after_fork_in_child)
setting_changed.connect(_settings_changed, dispatch_uid="echomq.layers")
