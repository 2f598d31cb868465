"""The lossy feed as this page sees it."""

from __future__ import annotations

from channels.layers import InMemoryChannelLayer, get_channel_layer


def crosses_processes() -> bool:
    """Tell whether an event of the worker can reach this process at all.

    Channels' in-memory layer ends at the process, and the replay runs in another one.
    """
    layer = get_channel_layer()
    return layer is not None and not isinstance(layer, InMemoryChannelLayer)
