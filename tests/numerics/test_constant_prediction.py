"""The loss of the best constant prediction: against a search for it, and against the losses of torch."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn import functional as F

from ikkuna.numerics.prediction import LOSS_FORMS, constant_figures

ROWS, COLUMNS = 400, 3


def draw(kind, seed=0, rows=ROWS, columns=COLUMNS):
    generator = torch.Generator().manual_seed(seed)
    z, y = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64).unbind()
    if kind == "numbers":
        return z, 2 * y + 1
    if kind == "shares":
        return z, (y > 0.5).double()
    if kind == "probabilities":
        return z.sigmoid(), (y > 0.5).double()
    if kind == "rows":
        return z, (2 * y).softmax(1)
    return z.log_softmax(1), (2 * y).softmax(1)


LOSSES = {
    "mse": ("numbers", F.mse_loss),
    "mae": ("numbers", F.l1_loss),
    "huber": ("numbers", F.smooth_l1_loss),
    "bce_with_logits": ("shares", F.binary_cross_entropy_with_logits),
    "bce": ("probabilities", F.binary_cross_entropy),
    "soft_cross_entropy": ("rows", F.cross_entropy),
    "kl_div": ("logarithms", lambda z, y: F.kl_div(z, y, reduction="batchmean")),
}


def best_constant(name, loss, y):
    """Return the least loss that one row of outputs, repeated, can have."""

    def of(row):
        z = torch.tensor(row).expand_as(y)
        z = z.sigmoid() if name == "bce" else z.log_softmax(1) if name == "kl_div" else z
        return float(loss(z, y))

    return minimize(of, np.zeros(y.shape[1]), method="Powell", options={"xtol": 1e-6, "ftol": 1e-10}).fun


@pytest.mark.parametrize("name", LOSS_FORMS)
def test_the_constant_is_the_best_one(name):
    """The correction for the number of rows is at most 1%."""
    kind, loss = LOSSES[name]
    z, y = draw(kind)
    form, share, constant = constant_figures(z, y, loss(z, y)).tolist()
    assert LOSS_FORMS[int(form)] == name
    best = best_constant(name, loss, y)
    assert constant == pytest.approx(best, rel=0.01)
    assert share == pytest.approx(float(loss(z, y)) / best, rel=0.01)


@pytest.mark.parametrize("name", LOSS_FORMS)
def test_the_best_constant_of_all_data_has_a_share_of_one_in_small_batches(name):
    """Without the corrections the share would be above 1 by the number of columns over that of rows."""
    kind, loss = LOSSES[name]
    shares = []
    for seed in range(400):
        _, y = draw(kind, seed, rows=16)
        _, many = draw(kind, 1000, rows=20_000)
        mean = many.median(0).values if name == "mae" else many.mean(0)
        row = {"bce_with_logits": mean.logit(), "bce": mean, "soft_cross_entropy": mean.log(), "kl_div": mean.log()}
        z = row.get(name, mean).expand_as(y)
        shares.append(constant_figures(z, y, loss(z, y))[1].item())
    assert np.nanmean(shares) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("reduction", ["sum", "half", "rows", "negative"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits])
def test_a_loss_is_recognised_whatever_is_summed(loss, reduction):
    z, y = draw("shares")
    whole = loss(z, y)
    value = {"sum": whole * ROWS * COLUMNS, "half": whole / 2, "rows": whole * COLUMNS, "negative": -whole}[reduction]
    expected, found = constant_figures(z, y, whole), constant_figures(z, y, value)
    if reduction == "negative":
        expected[1] *= -1
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("outputs", "labels", "loss"),
    [
        (torch.randn(8, 3), torch.randn(8), torch.tensor(1.0)),  # other shapes
        (torch.randn(8), torch.randint(0, 2, (8,)), torch.tensor(1.0)),
        (torch.randn(1, 3), torch.randn(1, 3), torch.tensor(1.0)),  # one row
        (torch.randn(0, 3), torch.randn(0, 3), torch.tensor(torch.nan)),
        (torch.randn(8, 3), torch.randn(8, 3), torch.randn(8)),
        (torch.ones(8, 3), torch.zeros(8, 3), torch.tensor(123.4)),  # another loss
        (torch.full((8, 3), torch.nan), torch.randn(8, 3), torch.tensor(torch.nan)),
        (torch.ones(8, 3), torch.ones(8, 3), torch.tensor(0.0)),
    ],
)
def test_what_is_not_known_is_not_named(outputs, labels, loss):
    form, share, constant = constant_figures(outputs, labels, loss).tolist()
    assert form == -1
    assert np.isnan(share)
    assert np.isnan(constant)


def test_equal_labels_have_no_share():
    """Each half of a batch of an adversarial network has one label."""
    z = torch.randn(8, 1)
    form, share, _ = constant_figures(z, torch.ones(8, 1), F.mse_loss(z, torch.ones(8, 1))).tolist()
    assert LOSS_FORMS[int(form)] == "mse"
    assert np.isnan(share)


@pytest.mark.parametrize("shape", [(4000, 5), (64, 3, 40, 40)])
def test_a_sample_of_large_outputs_is_enough(shape):
    z, y = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)).unbind()
    form, share, constant = constant_figures(z, y, F.mse_loss(z, y)).tolist()
    assert LOSS_FORMS[int(form)] == "mse"
    assert (share, constant) == (pytest.approx(2, rel=0.05), pytest.approx(1, rel=0.05))
