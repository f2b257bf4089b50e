"""How much the device has to do for a sampled step, counted on the simulated accelerator."""

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages.kinds import MODULE_KINDS
from ikkuna.export.subscriber import (
    MeanSubscriber,
    MinMaxSubscriber,
    NormSubscriber,
    RatioSubscriber,
    SparsitySubscriber,
    VarianceSubscriber,
)
from tests.accelerator.models import MODELS, train
from tests.simulated_device import recorded

pytestmark = pytest.mark.simulated

KINDS = ("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates")
BIASES = ("biases", "bias_gradients", "bias_updates")
METRICS = {
    "nothing": (),
    "norms": (lambda kind: NormSubscriber(kind, backend="null"),),
    "six metrics": tuple(
        lambda kind, make=make: make(kind, backend="null")
        for make in (NormSubscriber, MeanSubscriber, VarianceSubscriber, MinMaxSubscriber, SparsitySubscriber)
    ),
}


class Costs:
    """Two steps of a model, with and without subscribers; what the second one adds."""

    def __init__(self, bus, name, metrics, subsample=1):
        torch.manual_seed(0)
        model, inputs, labels = MODELS[name]()
        self.model, inputs, labels = model.to("sim"), inputs.to("sim"), labels.to("sim")
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.alone = self._step(inputs, labels)
        with Exporter(message_bus=bus, on_error="raise") as exporter:
            exporter.add_modules(self.model)
            for kind in (*KINDS, *BIASES):
                for make in METRICS[metrics]:
                    bus.register_subscriber(make(kind))
            for _ in range(3):
                self.log = self._step(inputs, labels)
        self.launches = self.log.launches - self.alone.launches
        self.written = self.log.written - self.alone.written
        self.read = self.log.read - self.alone.read

    def _step(self, inputs, labels):
        train(self.model, self.optimizer, inputs, labels)
        with recorded() as log:
            train(self.model, self.optimizer, inputs, labels)
        return log


@pytest.mark.parametrize("metrics", METRICS)
@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet"])
def test_show(bus, name, metrics):
    costs = Costs(bus, name, metrics)
    print(name, metrics, costs.alone.launches, costs.launches, costs.read, costs.written, costs.log.count("sync"), costs.alone.count("sync"), costs.log.count("d2h"))
    import collections
    print(collections.Counter(e.name for e in costs.log if e.kind!="launch").most_common(9))
