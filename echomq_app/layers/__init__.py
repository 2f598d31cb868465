"""EchoPubSub for Channels: group messages in order, or told that you fell behind."""

from .box import CURSOR_EXPIRED
from .consumers import CursorExpiredMixin
from .layer import EchoChannelLayer
from .stations import drain

__all__ = ["CURSOR_EXPIRED", "CursorExpiredMixin", "EchoChannelLayer", "drain"]
