"""The log against a list, for as long as the profile says: `make chaos`."""

from tests.integration.test_stream_model import (
    pytestmark,
    small_window,
    test_any_sequence_of_verbs,
)

__all__ = ["pytestmark", "small_window", "test_any_sequence_of_verbs"]
