"""Every module of torch: outputs and gradients are bit-identical, and norms are those of an independent reference."""

import pytest

from tests.real_models.torch_modules import check_evaluation, check_training, module_infos

NAMES = tuple(module_infos())
ORDINARY = (
    *("nn.BatchNorm2d", "nn.Conv2d", "nn.LazyConv1d", "nn.Linear", "nn.Bilinear", "nn.MaxPool2d", "nn.Embedding"),
    *("nn.LSTM", "nn.LSTMCell", "nn.TransformerDecoderLayer", "nn.ReLU", "nn.GLU"),
)
FEW, MANY = 3, 40


@pytest.mark.parametrize("name", ORDINARY)
def test_training(name: str) -> None:
    check_training(name, FEW)


@pytest.mark.parametrize("name", ORDINARY)
def test_evaluation(name: str) -> None:
    check_evaluation(name, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_training_on_many_inputs(name: str) -> None:
    check_training(name, MANY)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_on_many_inputs(name: str) -> None:
    check_evaluation(name, MANY)
