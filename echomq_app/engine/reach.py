"""How far a channel layer reaches: to other processes, or to the end of this one.

Everything that asks goes by `crosses_processes`: the engine, which sends to its own
listeners directly where no broker would bring it back, and whoever has to say that two
processes won't hear each other.

Channels' in-memory layer ends here. Another layer can say so of itself: its class has an
attribute `crosses_processes`, which is false for it, and then also a method `post(group, message)`
that sends from any thread, waits for nothing, and returns how many channels get it.
`EchoChannelLayer` without a transport does. All others are taken to have a broker.
"""

from __future__ import annotations

from typing import Any

from channels.layers import InMemoryChannelLayer

from . import in_memory


def crosses_processes(layer: Any) -> bool:
    """Tell whether what is sent over the layer (None: there is none) can leave the process."""
    if layer is None or isinstance(layer, InMemoryChannelLayer):
        return False
    # The class is asked first: channels-redis's pub/sub layer answers for any name that it
    # doesn't have by asking a layer of the running loop, and there may be none.
    return not hasattr(type(layer), "crosses_processes") or bool(layer.crosses_processes)


def post(layer: Any, group: str, message: dict[str, Any]) -> int:
    """Send to a group of a layer that ends here, from any thread; return how many get it.

    Doesn't wait. Raises what stands in the way: a message that can't be encoded, or an
    in-memory layer whose consumers' loop is unknown.
    """
    if isinstance(layer, InMemoryChannelLayer):
        return in_memory.post(layer, group, message)
    return int(layer.post(group, message))
