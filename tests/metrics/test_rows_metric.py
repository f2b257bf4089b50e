"""Statistics of rows while a network runs."""

import pytest
import torch

from ikkuna.export.subscriber import RowsSubscriber
from tests.metrics.running import watched
from tests.numerics.test_rows import random, reference


def test_averages_are_over_the_rows_of_all_calls():
    calls = [random(3, 4, 6), random(5, 6, seed=1)]
    found = watched(RowsSubscriber, calls, random(2, 6, seed=2))
    both = reference(torch.cat([call.reshape(-1, 6) for call in calls]))
    names = ("l2_norm", "mean", "max", "skewness", "kurtosis")
    assert [found[f"activations_row_{name}"][0] for name in names] == pytest.approx(both, rel=1e-5)
    last = reference(random(2, 6, seed=2))
    assert [found[f"activations_row_{name}"][1] for name in names] == pytest.approx(last, rel=1e-5)


def test_a_number_and_an_empty_tensor_publish_nothing():
    assert not watched(RowsSubscriber, torch.tensor(1.0), torch.zeros(0, 3))
