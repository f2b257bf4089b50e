"""Quantised weights are measured as the numbers that they stand for, or left out."""

import logging

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import NormSubscriber, PercentileSubscriber, SpectralNormSubscriber
from ikkuna.numerics.elements import readable
from ikkuna.testing import RecordingBackend


class Int8Weight(torch.Tensor):
    """A weight that looks like float32 and stores integers and a scale; it has no operators but ``dequantize`` and ``detach``."""

    @staticmethod
    def __new__(cls, codes, scale, offers=True):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale, offers=True):
        self.codes, self.scale = codes, scale
        self.offers = offers

    def dequantize(self):
        if not self.offers:
            raise NotImplementedError("cannot dequantize")
        return self.codes * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].offers)
        raise NotImplementedError(f"{func} is not implemented")


class Opaque(Int8Weight):
    """A weight that offers nothing."""

    dequantize = torch.Tensor.dequantize


class QuantizedLinear(nn.Module):
    """A frozen linear layer with a given weight."""

    def __init__(self, weight, numbers):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._numbers = [numbers]

    def forward(self, x):
        return x @ self._numbers[0].T


CODES = torch.randint(-127, 127, (6, 4), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
NUMBERS = CODES * 0.25


def train(bus, weight, caplog, kernels="native", steps=3):
    """Return the values of the quantised weight by kind, and the health at the end."""
    model = nn.Sequential(QuantizedLinear(weight, NUMBERS), nn.Linear(6, 2))
    recording = RecordingBackend()
    exporter = Exporter(message_bus=bus, kernels=kernels)
    exporter.add_modules(model)
    subscribers = (
        NormSubscriber("weights"),
        NormSubscriber("weights", p=3),
        PercentileSubscriber("weights", 100, exact=True),
        SpectralNormSubscriber("weights", subsample=1),
    )
    for subscriber in subscribers:
        subscriber.backends = (recording,)
        bus.register_subscriber(subscriber)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    exporter.close()
    shown = {series.kind: value for series, value, step in recording.values if series.name == "0" and step == steps - 1}
    assert any(series.name == "1" for series, _, _ in recording.values)
    return shown, exporter.health(), [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.fault(215)
@pytest.mark.parametrize("kernels", ["native", "eager"])
def test_a_weight_that_can_be_dequantised(bus, caplog, kernels):
    shown, health, logged = train(bus, Int8Weight(CODES, torch.tensor(0.25)), caplog, kernels)
    wide = NUMBERS.double()
    expected = {
        "weights_norm2": wide.norm().item(),
        "weights_norm3": wide.norm(3).item(),
        "weights_percentile_100": wide.max().item(),
        "weights_spectral_norm": torch.linalg.matrix_norm(wide, 2).item(),
    }
    assert {kind: shown[kind] for kind in expected} == pytest.approx(expected, rel=1e-3)
    assert (health.errors, health.skipped, health.disabled, logged) == (0, 0, (), [])


@pytest.mark.fault(215)
@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(lambda: CODES.view(torch.uint8), id="packed bytes"),
        pytest.param(lambda: CODES, id="integers"),
        pytest.param(lambda: Opaque(CODES, torch.tensor(0.25)), id="nothing offered"),
    ],
)
def test_a_weight_that_cannot_be_dequantised(bus, caplog, weight):
    """It is left out, counted once, and named in one line."""
    shown, health, logged = train(bus, weight(), caplog)
    assert not shown
    assert (health.errors, health.skipped, health.disabled) == (0, 1, ())
    assert len(logged) == 1
    assert "weights of 0" in logged[0]


@pytest.mark.fault(215)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_a_tensor_of_a_quantised_dtype(dtype):
    x = torch.quantize_per_tensor(NUMBERS, scale=0.25, zero_point=3, dtype=dtype)
    values, implied = readable(x)
    assert torch.equal(values, (x.int_repr().double() - 3).float() * 0.25)
    assert not implied


def test_integers_that_are_no_parameter_are_numbers():
    values, _ = readable(torch.tensor([3, -4], dtype=torch.int8))
    assert values.tolist() == [3.0, -4.0]
