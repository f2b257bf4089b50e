"""The z-loss, against numpy in float64."""

import math

import numpy as np
import pytest
import torch

from ikkuna.numerics import prediction
from ikkuna.numerics.prediction import z_loss_row


def reference(logits):
    z = logits.double().numpy().reshape(-1, logits.shape[-1])
    top = z.max(1)
    return ((np.log(np.exp(z - top[:, None]).sum(1)) + top) ** 2).sum(), len(z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 7, 11), (1, 1)])
def test_it_is_that_of_numpy(shape, dtype, monkeypatch):
    monkeypatch.setattr(prediction, "_BLOCK", 20)  # several blocks
    logits = (30 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    assert z_loss_row(logits).tolist() == pytest.approx(reference(logits), rel=1e-5)


def test_adding_a_constant_to_all_logits_adds_it_to_the_logarithm():
    logits = torch.randn(1, 9, dtype=torch.float64)
    before, after = (math.sqrt(z_loss_row(x)[0].item()) for x in (logits.abs(), logits.abs() + 3))
    assert after - before == pytest.approx(3)


def test_minus_infinity_excludes_a_class_and_others_make_it_nan():
    logits = torch.tensor([[1.0, -math.inf, 2.0]])
    assert z_loss_row(logits)[0].item() == pytest.approx(z_loss_row(logits[:, [0, 2]])[0].item())
    for bad in (math.nan, math.inf):
        assert math.isnan(z_loss_row(torch.tensor([[1.0, bad], [0.0, 0.0]]))[0].item())
    assert math.isnan(z_loss_row(torch.full((1, 3), -math.inf))[0].item())
    assert z_loss_row(torch.empty(0, 3)).tolist() == [0.0, 0.0]
    assert z_loss_row(torch.tensor([[1e30, 0.0]])).tolist() == pytest.approx([1e60, 1.0])
