"""The training examples draw their pictures, and their statements are true."""

import importlib
from itertools import pairwise

import pytest
import torch

from tests.plugins.children import ROOT


@pytest.fixture
def example(monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "training"))
    return importlib.import_module


@pytest.mark.parametrize(
    ("name", "arguments"), [("ex01_convergence", {"epochs": 1}), ("ex02_sharpness", {"steps": 21})]
)
def test_pictures_are_drawn(example, name, arguments, tmp_path):
    paths = example(name).main(tmp_path, **arguments)
    assert sorted(paths) == sorted(tmp_path.iterdir())
    assert all(path.stat().st_size > 5_000 for path in paths)


def test_layers_converge_from_the_bottom_up(example):
    module = example("ex01_convergence")
    torch.manual_seed(0)
    images, labels = example("digits_data").load(1797)
    model = module.convnet()
    kept = list(module.train(model, images[:1500], labels[:1500], 12))
    curves = list(module.compare_with_the_end(model, kept, images[1500:1756]).values())
    assert len(curves) == 4
    for lower, upper in pairwise(curves):
        assert all(a > b for a, b in zip(lower[:-2], upper[:-2], strict=True))
    assert [curve[-1] > 0.99 for curve in curves] == [True] * 4


def test_sharpness_stays_at_two_over_the_learning_rate(example):
    images, labels = example("digits_data").load(300)
    targets = torch.nn.functional.one_hot(labels, 10).float()
    (_, sharpness), _ = example("ex02_sharpness").train(images, targets, 1.0, 500, 25)
    assert sharpness[0] < 1.6
    assert all(1.8 < value < 2.7 for value in sharpness[-6:])
