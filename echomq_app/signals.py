"""Django signals of this app. `sender` is the class that does the work.

A receiver runs where the event happens: keep it short. Its exception is logged,
never raised into the work.
"""

from __future__ import annotations

from django.dispatch import Signal

publish_failed = Signal()
"""A message could not be handed to the broker, and is lost. Arguments: `group`,
`count` (messages), `error`. Sent from the engine's thread."""
