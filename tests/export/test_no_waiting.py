"""No code in a hook waits for a device: no operator whose result the host needs is called with tensors of the device."""

import pytest
import torch
from ikkuna_subscribers import non_finite
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ikkuna.export.messages import MessageBundle, ModuleMessage
from ikkuna.metrics.messages.message import NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.metrics.subscriber.registered import Registered
from ikkuna.numerics import geometry, spectrum
from ikkuna.numerics.statistics import FIELDS, float_code, needed_fields
from ikkuna.numerics.statistics.device import DeviceStatistics
from ikkuna.numerics.statistics.host import HostStatistics
from tests.subscribers import EVERY_SUBSCRIBER

aten = torch.ops.aten
WAITING = {
    *(aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.nonzero, aten.equal, aten.masked_select),
    *(aten._unique2, aten.unique_dim, aten.bincount, aten.repeat_interleave, aten._linalg_svd, aten._linalg_eigh),
}
STAMP = Stamp(0, 0, 0)


class NoWaiting(TorchDispatchMode):
    """Refuse operators that copy a number to the host before they return."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in WAITING, f"{func} waits for the device"
        if func is aten.index.Tensor:
            assert not any(i is not None and i.dtype is torch.bool for i in args[1]), "a mask waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Use the code paths of device tensors with host tensors."""
    monkeypatch.setattr(float_code, "_count_on_host", float_code._count_on_device)
    monkeypatch.setattr(float_code, "library", lambda: None)
    monkeypatch.setattr(geometry, "_product", lambda x, y: torch.dot(x.double(), y.double()))
    monkeypatch.setattr(spectrum, "_is_extreme", lambda sigma: False)
    monkeypatch.setattr(non_finite, "is_true_on_host", lambda finite: False)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def message_for(subscriber):
    if Registered(subscriber).together:
        seen = {"network_output": random(6, 8), "input_labels": torch.arange(6), "loss": random()}
        return MessageBundle({kind: NetworkMessage(STAMP, kind, seen[kind]) for kind in subscriber.kinds})
    return ModuleMessage(STAMP, subscriber.kinds[0], random(6, 8), module="a", name="a")


def test_the_mode_sees_what_waits():
    with NoWaiting(), pytest.raises(AssertionError, match="waits"):
        random(3).sum().item()
    with NoWaiting(), pytest.raises(AssertionError, match="waits"):
        random(3)[torch.ones(3, dtype=torch.bool)]


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("shape", [(6, 8), (0,), (), (300_000,)])
def test_no_statistic_of_a_device_tensor_waits(shape):
    generator = torch.Generator().manual_seed(0)
    statistics, weight = DeviceStatistics(torch.device("cpu")), torch.tensor(2)
    with NoWaiting():
        for _ in range(65):
            assert statistics.add(0, random(*shape), needed_fields(FIELDS), weight, generator)
        statistics.take()


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("name", [n for n, make in EVERY_SUBSCRIBER.items() if make().measures])
def test_no_measure_of_a_subscriber_waits(name, monkeypatch):
    subscriber = EVERY_SUBSCRIBER[name]()
    monkeypatch.setattr(type(subscriber), "network", (), raising=False)
    with NoWaiting(), torch.no_grad():
        subscriber.measure(message_for(subscriber))
        subscriber.measure(message_for(subscriber))


def test_a_model_is_watched_on_its_device_without_waiting(bus, monkeypatch):
    """The whole way from hook to row, with tensors that say they are elsewhere."""
    from ikkuna.export import Exporter
    from ikkuna.export.subscriber import MomentsSubscriber, NormSubscriber

    def on_host(tensor, *arguments, **options):
        raise AssertionError("the host's kernel was used")

    monkeypatch.setattr(HostStatistics, "add", on_host)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(model)
        for kind in ("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates"):
            bus.register_subscriber(NormSubscriber(kind, backend="null"))
            bus.register_subscriber(MomentsSubscriber(kind, backend="null"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with NoWaiting():
            model(random(5, 3)).sum().backward()
            optimizer.step()
        assert exporter.health().steps == 1
