"""A line that is idle, for the whole minute: `make chaos`."""

from tests.integration.test_layer_idle import test_a_line_that_is_idle_for_a_minute

__all__ = ["test_a_line_that_is_idle_for_a_minute"]
