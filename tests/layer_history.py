"""Judges what subscribers of the layer have heard, from the histories of all processes.

The guarantee, for each subscriber and each life of each sender: messages come in order
and once; where one is missing that was sent after the subscriber had joined, a notice
that names the sender's node comes before the next message of it, or, at the end, after
the last one.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

BLUR = 0.1
"""Seconds by which the clocks of two processes, and a line of a history, may be late."""


@dataclasses.dataclass(slots=True)
class Life:
    """One process: what it sent and when, and what it heard, in order."""

    life: str
    node: str
    joined_at: float | None
    """None: it joined no group, and hears nothing."""
    sent_at: list[float] = dataclasses.field(default_factory=list)
    heard: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    ended: bool = False

    def notices(self) -> int:
        return sum("told" in entry for entry in self.heard)

    def messages(self) -> int:
        return sum("n" in entry for entry in self.heard)


def read(folder: Path) -> dict[str, Life]:
    """Return the histories in a folder, by life."""
    lives = {}
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.endswith("}")]  # a kill cuts one
        if not entries:
            continue
        life = Life(entries[0]["life"], entries[0]["node"], entries[0]["at"])
        for entry in entries[1:]:
            if "sends" in entry:
                life.sent_at.append(entry["at"])
            elif "sent" in entry:
                life.ended = True
            else:
                life.heard.append(entry)
        lives[life.life] = life
    return lives


def judge(lives: dict[str, Life]) -> list[str]:
    """Return what is wrong: a sentence each; nothing if the guarantee was kept."""
    faults = []
    for subscriber in lives.values():
        for sender in lives.values():
            faults += _judge(subscriber, sender)
    return faults


def _judge(subscriber: Life, sender: Life) -> list[str]:
    if subscriber.joined_at is None:
        return []
    faults = []
    # What was sent while it joined it may have heard or not.
    must = next(
        (n for n, at in enumerate(sender.sent_at) if at >= subscriber.joined_at + BLUR),
        len(sender.sent_at),
    )
    due, told = None, False
    for entry in subscriber.heard:
        # Its own name is in the notice of an overflow, which drops messages of anybody.
        if entry.get("told") in (sender.node, subscriber.node):
            told = True
        if entry.get("from") != sender.life:
            continue
        n = entry["n"]
        if due is not None and n < due:
            faults.append(f"{subscriber.life} heard {sender.life}'s {n} again; {due} was due")
        elif n > (must if due is None else due) and not told:
            faults.append(f"{subscriber.life} missed {sender.life}'s {due} to {n - 1}, untold")
        due, told = max(due or 0, n + 1), False
    missing = len(sender.sent_at) - (must if due is None else due)
    # Who was killed may have written down a message that it never got to send.
    if subscriber.ended and not told and missing > (0 if sender.ended else 1):
        faults.append(f"{subscriber.life} missed {sender.life}'s last {missing}, untold")
    return faults
