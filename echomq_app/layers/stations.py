"""The stations of this process: one per configuration; their exit and their fork."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  (its own exit hook has to come after ours)
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
        engine.flush(deadline - time.monotonic())  # what the feed still has goes this way too
    for one in stations:
        one.leave(max(0.1, deadline - time.monotonic()))
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
    """Forget the stations: the layers are made anew."""
    if setting == "CHANNEL_LAYERS":
        with _lock:
            _stations.clear()


def _register_exit() -> None:
    # At the end of the main thread, when name resolution and new connections still work:
    # an atexit handler comes too late for both (it only seems to work with 127.0.0.1).
    # concurrent.futures hooks in at the same place. A child of multiprocessing, which runs
    # no atexit handlers, comes by here too.
    register = getattr(threading, "_register_atexit", atexit.register)
    register(leave_all)


_register_exit()
os.register_at_fork(after_in_child=_after_fork_in_child)
setting_changed.connect(_settings_changed, dispatch_uid="echomq.layers")
