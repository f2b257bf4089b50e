"""The distance between running statistics and those of a batch, against numpy in float64."""

import numpy as np
import pytest
import torch

from ikkuna.numerics.layers import running_statistics_distance


def drawn(*shape):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * 3 + 5
    return x, torch.randn(shape[1], generator=generator), torch.rand(shape[1], generator=generator) + 0.1


def expected(x, mean, variance):
    rows = np.moveaxis(x.double().numpy(), 1, -1).reshape(-1, x.shape[1])
    m, r = mean.double().numpy(), variance.double().numpy() + 1e-5
    return np.mean((rows.mean(0) - m) ** 2 / r), np.mean(np.log((rows.var(0) + 1e-5) / r) ** 2)


@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 5), (4, 2, 7, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_distances_are_those_of_numpy(shape, dtype):
    x, mean, variance = drawn(*shape)
    x = x.to(dtype)
    assert running_statistics_distance(x, mean, variance).tolist() == pytest.approx(
        expected(x, mean, variance), rel=1e-4
    )


def test_distances_to_the_statistics_of_the_batch_are_0():
    x, _, _ = drawn(16, 3, 4)
    mean, variance = x.mean((0, 2)), x.var((0, 2), correction=0)
    assert running_statistics_distance(x, mean, variance).tolist() == pytest.approx([0, 0], abs=1e-9)


def test_a_sample_of_many_positions_has_nearly_the_same_distances():
    x, mean, variance = drawn(8, 2, 100, 100)
    found = running_statistics_distance(x, mean, variance).tolist()
    assert found == pytest.approx(expected(x, mean, variance), rel=0.05)
    assert found != pytest.approx(expected(x, mean, variance), rel=1e-9)


def test_a_nan_stays_one():
    x, mean, variance = drawn(8, 2)
    x[0, 0] = torch.nan
    assert running_statistics_distance(x, mean, variance).isnan().all()
