"""One copy to the host per sampled step has everything; if it fails, values of the host remain, and training goes on."""

import pytest
import torch

from ikkuna.export import Exporter
from ikkuna.export.subscriber import NormSubscriber, PlotSubscriber, name_results
from ikkuna.numerics.statistics.device import DeviceStatistics
from ikkuna.observation.rows import rows as rows_module
from ikkuna.support.device_thread import HostCopy
from ikkuna.testing import RecordingBackend
from tests.accelerator.models import MODELS, train
from tests.simulated_device import recorded

pytestmark = pytest.mark.simulated


class LargestSubscriber(PlotSubscriber):
    """Measures the largest magnitudes of rows, on the device or on the host."""

    def __init__(self, kind, place, **options):
        name_results(options, f"{kind}_on_{place}")
        super().__init__(kind, **options)
        self.place = place

    def measure(self, message):
        if self.place == "cpu":
            return torch.tensor([float(message.data.numel()), 1.0], device="cpu")
        return message.data.abs().amax().expand(2)

    def compute(self, message):
        self.emit(message, float(message.data.sum()))


class Training:
    """Some steps of a small model with a norm and two own metrics."""

    def __init__(self, bus):
        torch.manual_seed(0)
        with torch.device("cpu"):
            model, inputs, labels = MODELS["mlp"]()
        self.model, self.data = model.to("sim"), (inputs.to("sim"), labels.to("sim"))
        self.optimizer, self.recording = torch.optim.SGD(self.model.parameters(), lr=0.1), RecordingBackend()
        self.exporter = Exporter(message_bus=bus)
        self.exporter.add_modules(self.model)
        bus.register_subscriber(NormSubscriber("activations", backend=self.recording))
        for place in ("cpu", "sim"):
            bus.register_subscriber(LargestSubscriber("activations", place, backend=self.recording))

    def step(self):
        with recorded() as log:
            train(self.model, self.optimizer, *self.data)
        return log

    def values(self):
        """Return the number of values of each kind at each step."""
        found = {}
        for series, _, step in self.recording.values:
            found.setdefault(step, {}).setdefault(series.kind, 0)
            found[step][series.kind] += 1
        return found


KINDS = {"activations_norm2", "activations_on_cpu", "activations_on_sim"}


@pytest.mark.parametrize("with_kernels", [False, True])
def test_own_results_travel_in_the_copy_of_the_step(bus, request, with_kernels):
    if with_kernels:
        request.getfixturevalue("kernels")
    training = Training(bus)
    for _ in range(3):
        log = training.step()
    training.exporter.close()
    assert log.count("d2h") == 1
    assert log.count("sync") == 0
    assert {kind: count for kind, count in training.values()[2].items() if kind in KINDS} == dict.fromkeys(KINDS, 5)


def failing(where):
    def fails(*args):
        raise RuntimeError("an illegal memory access was encountered")

    return {
        "waiting": (HostCopy, "arrays", fails),
        "copying": (rows_module, "HostCopy", fails),
        "merging": (DeviceStatistics, "take", fails),
    }[where]


@pytest.mark.parametrize("where", ["waiting", "copying", "merging"])
def test_a_copy_that_fails_costs_the_values_of_its_device(bus, monkeypatch, where):
    training = Training(bus)
    for _ in range(4):
        training.step()
    before = [p.detach().cpu() for p in training.model.parameters()]
    with monkeypatch.context() as patch:
        patch.setattr(*failing(where))
        for _ in range(4):
            training.step()
    assert not any(map(torch.equal, before, [p.detach().cpu() for p in training.model.parameters()]))
    for _ in range(3):
        training.step()
    training.exporter.close()
    values = training.values()
    lost = [step for step in range(11) if "activations_norm2" not in values[step]]
    assert 2 <= len(lost) <= 4
    assert all(values[step]["activations_on_cpu"] == 5 for step in range(11))
    if where != "merging":
        assert not [step for step in lost if "activations_on_sim" in values[step]]
    assert training.exporter.health().errors == len(lost)
    assert values[10]["activations_norm2"] == 5
