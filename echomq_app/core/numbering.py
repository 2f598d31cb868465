"""Senders number their messages; the receiver sees holes and repeats.

A broker may drop messages without a word (channels-redis does, beyond a channel's
capacity), and may deliver one twice. With a number from each sender, per group, a hole
shows with that sender's next message.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

_SENDERS = 4096  # Remembered at most; a forgotten one starts over, which is no hole.


class SenderNumbers:
    """What number is due next from each sender."""

    def __init__(self, senders: int = _SENDERS) -> None:
        self._due: OrderedDict[Hashable, int] = OrderedDict()
        self._senders = senders

    def take(self, sender: Hashable, number: int) -> int | None:
        """Note that `number` arrived; return how many are missing before it.

        None is a repeat, to be dropped. The first number of a sender sets the start.
        """
        due = self._due.get(sender, number)
        if number < due:
            return None
        self._due[sender] = number + 1
        self._due.move_to_end(sender)
        if len(self._due) > self._senders:
            self._due.popitem(last=False)
        return number - due

    def forget(self) -> None:
        """Start over with every sender: what is missing is known otherwise."""
        self._due.clear()
