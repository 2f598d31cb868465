"""Django signals of this app. `sender` is the class that does the work.

A receiver runs where the event happens: keep it short. Its exception is logged,
never raised into the work.
"""

from __future__ import annotations

from django.dispatch import Signal

publish_failed = Signal()
"""A message could not be handed to the broker, and is lost. Arguments: `group`,
`count` (messages), `error`. Sent from the engine's thread."""

buffer_flush = Signal()
"""The channel layer let new messages go to the other nodes. Arguments: `count` (messages),
`nodes` (that are sent to at once), `fill` (of the fullest buffer, 0 to 1). This and all
that follow: from the engine's thread."""

batch_acked = Signal()
"""A node has acked a batch. Arguments: `node`, `index` (of the producer), `seconds` (since
it was sent)."""

buffer_expired = Signal()
"""A node needs messages that are overwritten, and will be told. Arguments: `node` (its
name), `index` (of the producer), `missed` (messages)."""

buffer_capacity_warning = Signal()
"""A buffer is filling up with messages that some node hasn't acked. Arguments: `fill`
(0 to 1), `used` (messages), `buffer_size`. At most once per capacity_warning_interval."""

sync_failure = Signal()
"""A batch could not be sent, or wasn't acked in time; it will be sent again. Arguments:
`node`, `index`, `reason`."""

retry_scheduled = Signal()
"""A node that failed is asked again later. Arguments: `node`, `delay` (seconds),
`attempt`."""

node_joined = Signal()
"""Another node is there, for the first time or again. Arguments: `node`, `nodes` (how many
others there are now)."""

node_forgotten = Signal()
"""A node has left, or is silent for too long. Arguments: `node`, `nodes`, `reason`."""

batch_delivered = Signal()
"""Messages of another node reached the channels of this process. Arguments: `count`."""

cursor_expired = Signal()
"""The channels of this process were told that they have missed messages. Arguments:
`node`, `missed` (0: nobody knows how many), `channels` (how many were told)."""
