"""Jobs against their model for much longer: `make chaos`. The suite has its short form."""

import hypothesis
import pytest

from tests.integration.test_jobs_model import test_any_sequence_of_steps

__all__ = ["test_any_sequence_of_steps"]

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.skipif(hypothesis.settings().max_examples < 1000, reason="only in make chaos"),
]
