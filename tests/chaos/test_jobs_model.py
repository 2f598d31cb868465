"""Jobs against their model, for as long as the profile says: `make chaos`."""

from tests.integration.test_jobs_model import pytestmark, test_any_sequence_of_steps

__all__ = ["pytestmark", "test_any_sequence_of_steps"]
