"""The hub's readers against lists, for as long as the profile says: `make chaos`."""

from tests.integration.test_live_model import (
    no_polling,
    pytestmark,
    test_readers_of_a_stream_that_changes_at_every_moment,
)

__all__ = ["no_polling", "pytestmark", "test_readers_of_a_stream_that_changes_at_every_moment"]
