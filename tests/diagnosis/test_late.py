"""Faults that begin after step 3,000, when rules sample at every 80th step only, are named."""

import pytest

from tests.diagnosis.late import EVERY, LATE, delay

SAMPLES = 8  # the patience of rank_collapse and what it needs before


@pytest.mark.slow
@pytest.mark.parametrize("fault", LATE, ids=lambda fault: fault.__name__)
def test_a_fault_that_begins_late_is_named(fault):
    later = 4 * EVERY
    rule, steps = delay(fault, "mlp", later, begin=3303, steps=4000)
    assert rule in LATE[fault]
    assert 0 <= steps <= 2 * later * SAMPLES
