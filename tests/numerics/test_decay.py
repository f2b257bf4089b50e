"""The part of weight decay in an update, against optimizers in float64 whose gradient is the decay alone."""

import pytest
import torch

from ikkuna.numerics.geometry import adam_decay, decay_row, decoupled_decay, sgd_decay

RATE, DECAY, STEPS = 1e-9, 0.3, 400


def updates_of(make, **options):
    """Return the weight, the last update with noisy gradients, and the optimizer, of weights that hardly change."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, dtype=torch.float64, generator=generator).requires_grad_()
    optimizer = make([weight], lr=RATE, weight_decay=DECAY, **options)
    for _ in range(STEPS):
        weight.grad = torch.randn(50, dtype=torch.float64, generator=generator)
        before = weight.detach().clone()
        optimizer.step()
    return before, weight.detach() - before, optimizer


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.4}, {"momentum": 0.9, "nesterov": True}],
    ids=str,
)
def test_sgd_is_linear_so_that_the_updates_with_and_without_decay_differ_by_its_part(options):
    before, update, _ = updates_of(torch.optim.SGD, **options)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, dtype=torch.float64, generator=generator).requires_grad_()
    without = torch.optim.SGD([weight], lr=RATE, **options)
    for _ in range(STEPS):
        weight.grad = torch.randn(50, dtype=torch.float64, generator=generator)
        start = weight.detach().clone()
        without.step()
    expected = update - (weight.detach() - start)
    assert torch.allclose(sgd_decay(before, RATE, DECAY, **options), expected, rtol=1e-4, atol=1e-15)


def test_the_part_of_adam_is_its_step_with_the_decay_as_the_first_moment():
    before, _, optimizer = updates_of(torch.optim.Adam)
    [state] = optimizer.state.values()
    step, (beta1, beta2) = int(state["step"]), (0.9, 0.999)
    moment = torch.zeros_like(before)
    for _ in range(step):
        moment = beta1 * moment + (1 - beta1) * DECAY * before
    variance = state["exp_avg_sq"] / (1 - beta2**step)
    expected = -RATE * (moment / (1 - beta1**step)) / (variance.sqrt() + 1e-8)
    got = adam_decay(before, RATE, DECAY, state["exp_avg_sq"], state["step"], beta2, 1e-8)
    assert torch.allclose(got, expected, rtol=1e-6)


def test_adamw_without_gradient_is_decay_alone():
    weight = torch.randn(9, dtype=torch.float64).requires_grad_()
    before = weight.detach().clone()
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=DECAY)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.allclose(weight.detach() - before, decoupled_decay(before, 0.1, DECAY), rtol=1e-12)


def test_the_row_has_the_squares_of_both_parts_and_the_number_of_changed_elements():
    update, decay = torch.randn(2, 5, 7, dtype=torch.float64)
    update[0, :3] = 0.0
    expected = [float((decay.numpy() ** 2).sum()), float(((update - decay).numpy() ** 2).sum()), 32.0]
    assert decay_row(update, decay).tolist() == pytest.approx(expected)
