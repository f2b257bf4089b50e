"""The number of directions in which rows differ, against eigenvalues computed by numpy."""

import math

import numpy as np
import pytest
import torch

from ikkuna.numerics.representation import dimension


def reference(rows):
    eigenvalues = np.linalg.eigvalsh(np.cov(rows, rowvar=False, bias=True))
    return eigenvalues.sum() ** 2 / (eigenvalues**2).sum()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(20, 5), (5, 20), (4, 7, 6)])
def test_it_is_that_of_the_covariance(shape, dtype):
    x = (3 + torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert dimension(x).item() == pytest.approx(reference(x.double().reshape(-1, shape[-1]).numpy()), rel=1e-4)


def test_a_channel_of_pictures_is_a_unit():
    x = torch.randn(3, 5, 4, 2)
    rows = x.movedim(1, -1).reshape(-1, 5).double().numpy()
    assert dimension(x).item() == pytest.approx(reference(rows))


@pytest.mark.parametrize(
    ("shape", "distance"), [((1000, 5), 20), ((10, 100, 5), 21), ((10, 5, 20, 5), 21), ((8, 125, 5), 21)]
)
def test_of_many_rows_equally_spaced_ones_are_read(shape, distance):
    x = torch.randn(shape)
    rows = (x.movedim(1, -1) if x.ndim == 4 else x).reshape(-1, 5).double().numpy()
    assert dimension(x, 50).item() == pytest.approx(reference(rows[::distance]))


@pytest.mark.parametrize("samples", [63, 64, 128, 256])
@pytest.mark.parametrize("axes", [(17,), (4, 4)])
def test_the_rows_are_of_all_positions(samples, axes):
    """The first position has the same values in each sample, as that of a token of the class before the first attention."""
    x = torch.randn(samples, *axes, 6)
    x.view(samples, -1, 6)[:, 0] = 1.0
    assert dimension(x if len(axes) == 1 else x.movedim(-1, 1), 64).item() > 3


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_scale_of_the_units_and_their_means_change_nothing(scale):
    x = torch.randn(30, 4, dtype=torch.float64)
    assert dimension(scale * (x + 5)).item() == pytest.approx(dimension(x).item())


def test_rows_on_a_line_have_one_dimension():
    assert dimension(torch.randn(30, 1) * torch.randn(8) + torch.randn(8)).item() == pytest.approx(1)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 8),
        torch.ones(10, 8),
        torch.randn(10, 8).index_fill(0, torch.tensor([4]), math.nan),
        torch.randn(10, 8).index_fill(0, torch.tensor([4]), math.inf),
        torch.randn(8),
        torch.zeros(0, 8),
        torch.randn(10, 8, dtype=torch.complex64),
    ],
)
def test_what_has_no_dimension_is_nan(x):
    assert math.isnan(dimension(x).item())


def test_constant_rows_have_no_dimension_whatever_their_number():
    assert all(dimension(torch.full((n, 8), 0.1)).isnan() for n in range(4, 65))
