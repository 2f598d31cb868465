"""One background event loop per process: where sync code hands over async work.

All that this app sends over a channel layer goes through here, because
`async_to_sync(group_send)` opens a new loop and new connections for each message. It
starts on first use, again after a fork, and ends with the process. Nothing here blocks
its caller but `flush`, and nothing waits for the broker.
"""

from __future__ import annotations

from .in_memory import bind_loop
from .process import engine as _engine
from .wake import WakeWaiter

__all__ = [
    "WakeWaiter",
    "add_sink",
    "bind_loop",
    "flush",
    "has_broker",
    "joined",
    "link_is_good",
    "notify",
    "remove_sink",
    "send",
    "stop",
    "submit",
    "waiter",
]

add_sink = _engine.add_sink
flush = _engine.flush
has_broker = _engine.has_broker
joined = _engine.joined
link_is_good = _engine.link_is_good
notify = _engine.notify
remove_sink = _engine.remove_sink
send = _engine.send
stop = _engine.stop
submit = _engine.submit
waiter = _engine.waiter
