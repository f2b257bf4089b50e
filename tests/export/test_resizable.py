"""A storage can be resized after a tensor in it was measured."""

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.subscriber import HistogramSubscriber, NormSubscriber, PercentileSubscriber, PrecisionSubscriber
from ikkuna.metrics.messages.kinds import MODULE_KINDS
from ikkuna.numerics.elements import host_array, to_array
from ikkuna.numerics.statistics.histogram import percentiles


@pytest.mark.fault(205)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernels", ["native", "eager"])
def test_what_was_measured_in_training_stays_resizable(bus, kernels, dtype):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    held = []
    for module in model:
        module.register_forward_hook(lambda module, args, output: held.append(output))
    exporter = Exporter(message_bus=bus, on_error="raise", kernels=kernels)
    exporter.add_modules(model)
    for kind in MODULE_KINDS:
        bus.register_subscriber(NormSubscriber(kind, backend="null"))
        bus.register_subscriber(NormSubscriber(kind, p=3, backend="null"))
        bus.register_subscriber(PercentileSubscriber(kind, 50, exact=True, backend="null"))
        bus.register_subscriber(HistogramSubscriber(kind, subsample=1, backend="null"))
        bus.register_subscriber(PrecisionSubscriber(kind, backend="null"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, dtype=dtype)).square().sum().backward()
    optimizer.step()
    exporter.close()
    tensors = [*held, *model.parameters(), *(p.grad for p in model.parameters())]
    assert all(tensor.untyped_storage().resizable() for tensor in tensors)
    tensors[0].untyped_storage().resize_(0)


@pytest.mark.fault(205)
@pytest.mark.parametrize("function", [to_array, host_array, lambda x: percentiles([x], [50.0])])
def test_what_a_function_reads_stays_resizable(function):
    x = torch.arange(6, dtype=torch.float64)
    function(x)
    assert x.untyped_storage().resizable()


def test_an_array_of_a_tensor_keeps_its_memory():
    array = host_array(torch.arange(1000.0).mul(2.0))
    others = [torch.zeros(1000) for _ in range(10)]
    assert array.tolist() == [2.0 * i for i in range(1000)]
    assert all(not other.any() for other in others)
