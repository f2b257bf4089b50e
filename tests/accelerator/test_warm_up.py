"""Kernels are compiled when subscribers register, and none within a step."""

import pytest
import torch
from torch import Tensor, nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import HistogramSubscriber, NormSubscriber, VarianceSubscriber
from ikkuna.numerics.statistics.device import triton_launcher
from ikkuna.numerics.statistics.float_code import WORTH_SAMPLING

pytestmark = [pytest.mark.simulated, pytest.mark.usefixtures("kernels")]


@pytest.fixture
def variants(monkeypatch):
    """Record the variants that Triton would compile: by constants, and by dtypes and alignment of tensors."""
    launch, found = triton_launcher.launch, []

    def recording(kernel, programs, *args, **constants):
        tensors = [(x.dtype, x.data_ptr() % 16 == 0) for x in args if isinstance(x, Tensor)]
        found.append((kernel.__name__, repr(constants), *tensors))
        launch(kernel, programs, *args, **constants)

    monkeypatch.setattr(triton_launcher, "launch", recording)
    triton_launcher.triton_kernels(torch.device("sim", 0)).warm.clear()  # what earlier tests have compiled
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("metrics", [(NormSubscriber,), (VarianceSubscriber, HistogramSubscriber)])
def test_steps_launch_only_what_was_compiled(bus, variants, dtype, metrics):
    class Casts(nn.Module):
        def forward(self, x):
            return x.half()

    model = nn.Sequential(nn.Linear(5, WORTH_SAMPLING // 4, dtype=dtype), Casts())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        for kind in (
            "activations",
            "layer_gradients",
            "weights",
            "weight_gradients",
            "weight_updates",
            "bias_gradients",
        ):
            for metric in metrics:
                bus.register_subscriber(metric(kind, subsample=1, backend="null"))
        compiled = set(variants)
        variants.clear()
        for rows in (3, 7):
            optimizer.zero_grad()
            model(torch.randn(rows, 5, dtype=dtype)).float().sum().backward()
            storage = torch.zeros(model[0].bias.numel() + 1, dtype=dtype)  # a gradient with an odd address
            model[0].bias.grad = storage[1:].copy_(model[0].bias.grad)
            optimizer.step()
    assert len(variants) > 10
    assert {name for name, *_ in variants} >= {"measure_one", "measure_list", "merge_rows"}
    assert set(variants) <= compiled
