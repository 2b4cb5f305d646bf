"""Settings of the generated cases: the same in every run, few in the suite, many under `-m slow`."""

import pytest
from hypothesis import HealthCheck, settings


def examples(few: int, many: int):
    """Parametrises a test with the number of examples to try."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])


def seeded(count: int):
    """Hypothesis settings of so many examples that do not depend on earlier runs."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
