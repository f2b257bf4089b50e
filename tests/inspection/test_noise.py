"""The gradient noise scale."""

import math

import pytest
import torch
from torch import nn

from ikkuna import netdict
from ikkuna.errors import ConfigError


def test_two_batch_sizes():
    """E53."""
    found = netdict.two_batch_noise_scale(10, 14.0, 50, 6.0)
    assert (found.grad_sq, found.trace, found.noise_scale) == pytest.approx((4, 100, 25))


def test_a_line_through_exact_points():
    """E54."""
    found = netdict.fit_noise_scale([10, 20, 50, 100], [14.0, 9.0, 6.0, 5.0])
    assert (found.grad_sq, found.trace, found.noise_scale) == pytest.approx((4, 100, 25))


def test_a_line_through_noisy_points():
    """E55."""
    found = netdict.fit_noise_scale([10, 20, 50, 100], [14.5, 8.6, 6.3, 4.9])
    assert (found.grad_sq, found.trace, found.noise_scale) == pytest.approx((3.87755102, 104.3877551, 26.92105263))
    weighted = netdict.fit_noise_scale([10, 20, 50], [14.5, 8.6, 6.3], [1.0, 0.0, 1.0])
    two = netdict.two_batch_noise_scale(10, 14.5, 50, 6.3)
    assert (weighted.grad_sq, weighted.trace) == pytest.approx((two.grad_sq, two.trace))


def test_a_negative_estimate_is_no_scale():
    """E57."""
    found = netdict.two_batch_noise_scale(8, 1.0, 16, 0.4)
    assert (found.grad_sq, found.trace) == pytest.approx((-0.2, 9.6))
    assert math.isnan(found.noise_scale)
    assert not found.valid


def quadratic(reduction):
    """Squared distance to drawn samples: the gradient of one sample is w - x."""
    model = nn.Linear(3, 1, bias=False).double()
    model.weight.data.zero_()
    generator = torch.Generator().manual_seed(0)

    def closure():
        x = 1 + torch.randn(8, 3, generator=generator, dtype=torch.float64)
        losses = ((model.weight - x) ** 2).sum(1) / 2
        return losses.mean() if reduction == "mean" else losses.sum()

    return model, closure


@pytest.mark.parametrize("method", ["two_batch", "curve"])
def test_a_mean_and_a_sum_loss_agree(method):
    """E58."""
    found = [
        netdict.compute_noise_scale(*quadratic(reduction), 8, 20, reduction=reduction, method=method)
        for reduction in ("mean", "sum")
    ]
    assert (found[0].grad_sq, found[0].trace) == pytest.approx((found[1].grad_sq, found[1].trace))


def test_the_estimate_approaches_the_truth():
    """True |G|² is 3 and the trace of the unit covariance 3."""
    found = netdict.compute_noise_scale(*quadratic("mean"), 8, 200, num_average=3)
    assert found.grad_sq == pytest.approx(3, rel=0.1)
    assert found.trace == pytest.approx(3, rel=0.1)
    assert found.noise_scale == pytest.approx(1, rel=0.15)


def test_stored_gradients_stay():
    model, closure = quadratic("mean")
    model.weight.grad = torch.ones(1, 3, dtype=torch.float64)
    netdict.compute_noise_scale(model, closure, 8, 3)
    assert model.weight.grad.tolist() == [[1, 1, 1]]


def test_the_hessian_weighs_directions():
    """E59: A = diag(1, 4), samples' covariance diag(2, 1), distance (1, 1)."""
    A = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64))
    gradient, covariance = A @ torch.ones(2, dtype=torch.float64), A @ torch.diag(torch.tensor([2.0, 1.0]).double()) @ A
    assert netdict.noise_scale_from_moments(gradient, covariance).noise_scale == pytest.approx(1.0588235294117647)
    assert netdict.noise_scale_from_moments(gradient, covariance, A).noise_scale == pytest.approx(1.0153846153846153)


def test_the_table():
    """E66."""
    lines = netdict.noise_scale_table([("GPT-2 baby", "OpenWebText", 25.0)]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["Model", "Dataset", "Noise Scale"]
    assert cells[2] == ["GPT-2 baby", "OpenWebText", "25"]
    assert set(cells[1][0]) == {"-"}


def test_bad_input():
    model, closure = quadratic("mean")
    for wrong in ({"num_iters": 1}, {"method": "x"}, {"reduction": "x"}):
        with pytest.raises(ConfigError):
            netdict.compute_noise_scale(model, closure, 8, **{"num_iters": 3, **wrong})
    with pytest.raises(ConfigError, match="depends on the model"):
        netdict.compute_noise_scale(model, lambda: torch.tensor(1.0), 8, 3)
    with pytest.raises(ConfigError, match="second larger"):
        netdict.two_batch_noise_scale(10, 1, 10, 1)
    with pytest.raises(ConfigError, match="two different"):
        netdict.fit_noise_scale([10, 10], [1, 2])
