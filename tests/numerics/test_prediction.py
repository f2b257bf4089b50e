"""Figures of outputs and labels, against formulas in float64."""

import math

import numpy as np
import pytest
import torch

from ikkuna.numerics.prediction import PREDICTION_FIGURES, prediction_figures

BINARY = ("output_magnitude", "output_binary_cross_entropy", "output_in_unit_interval")


def figures(outputs, labels, **options):
    return dict(zip(PREDICTION_FIGURES, prediction_figures(outputs, labels, **options).tolist(), strict=True))


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 5, torch.rand(shape, generator=generator)


@pytest.mark.parametrize("shape", [(1,), (7, 1), (5, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_labels_between_0_and_1_give_the_binary_cross_entropy(shape, dtype):
    z, y = (x.to(dtype) for x in drawn(*shape))
    logits, labels = z.double().numpy(), y.double().numpy()
    expected = np.mean(np.logaddexp(0, logits) - labels * logits)
    found = figures(z, y)
    assert found["output_binary_cross_entropy"] == pytest.approx(expected, rel=1e-12)
    assert found["output_magnitude"] == np.abs(logits).max()
    assert np.isnan(found["output_cross_entropy"])


@pytest.mark.parametrize(("limit", "expected"), [(0.0, 1.0), (1.0, 1.0), (-1e-3, 0.0), (1.001, 0.0)])
def test_outputs_between_0_and_1_are_recognised(limit, expected):
    outputs = torch.full((4, 3), 0.5)
    outputs[2, 1] = limit
    assert figures(outputs, torch.zeros(4, 3))["output_in_unit_interval"] == expected


@pytest.mark.parametrize(
    "labels", [torch.full((4, 3), 1.5), torch.full((4, 3), -0.5), torch.full((4, 3), torch.nan), torch.zeros(4), None]
)
def test_other_labels_have_no_binary_figures(labels):
    found = figures(torch.full((4, 3), 0.5), labels)
    assert all(np.isnan(found[name]) for name in BINARY)


def test_a_sample_of_many_outputs_contains_every_column():
    """The outputs of one column are outside; the number of columns divides the first choice of the stride."""
    outputs = torch.full((20_000, 6), 0.5)
    outputs[:, 5] = 2.0
    found = figures(outputs, torch.zeros(20_000, 6))
    assert found["output_in_unit_interval"] == 0
    expected = (5 * np.logaddexp(0, 0.5) + np.logaddexp(0, 2.0)) / 6
    assert found["output_binary_cross_entropy"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("classes", [2, 5, 1000])
def test_equal_outputs_have_the_cross_entropy_of_a_guess(classes):
    found = figures(torch.zeros(6, classes), torch.arange(6) % classes)
    assert found["output_uniform_cross_entropy"] == pytest.approx(np.log(classes))
    assert found["output_cross_entropy"] == pytest.approx(found["output_uniform_cross_entropy"])
    assert np.isnan(figures(torch.zeros(6, classes), torch.rand(6, classes))["output_uniform_cross_entropy"])


def test_outputs_that_are_not_finite_give_no_entropy():
    found = figures(torch.tensor([0.5, torch.nan]), torch.zeros(2))
    assert np.isnan(found["output_binary_cross_entropy"])
    assert found["output_in_unit_interval"] == 0


@pytest.mark.parametrize("width", [16, 64])
def test_a_sample_of_a_map_has_every_column(width):
    """One at equal distances is a single column of each picture."""
    columns = torch.arange(width).expand(16, width, width).clone()
    logits = torch.zeros(16, width, width, width).movedim(-1, 1)
    found = [figures(logits, columns, seed=seed) for seed in (0, 0, 1)]
    assert found[0]["label_count"] == 512
    assert found[0]["label_entropy"] > 0.9 * math.log(width)
    assert found[0]["label_entropy"] == found[1]["label_entropy"] != found[2]["label_entropy"]


@pytest.mark.parametrize("left_out", [50.0, math.nan, math.inf])
def test_items_that_are_left_out_have_no_part_in_any_figure(left_out):
    z, _ = drawn(10, 6)
    y = torch.arange(10) % 4
    z[5:], y[5:] = left_out, -100
    z[5:, 2] = 0.0
    found, expected = figures(z, y), figures(z[:5], y[:5])
    assert found == pytest.approx(expected, nan_ok=True, rel=1e-12)
    assert math.isnan(figures(z, torch.full_like(y, -100))["output_dependence"])
