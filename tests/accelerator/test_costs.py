"""How much a device has to do for a sampled step, counted on the simulated accelerator."""

from collections import Counter

import pytest
import torch

from ikkuna.export import Exporter
from ikkuna.export.subscriber import (
    CallbackSubscriber,
    MeanSubscriber,
    MinMaxSubscriber,
    NormSubscriber,
    SparsitySubscriber,
    VarianceSubscriber,
)
from tests.accelerator.models import MODELS, train
from tests.simulated_device import recorded

pytestmark = pytest.mark.simulated

KINDS = (
    *("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates"),
    *("biases", "bias_gradients", "bias_updates"),
)
METRICS = {
    "norms": (NormSubscriber,),
    "five metrics": (NormSubscriber, MeanSubscriber, VarianceSubscriber, MinMaxSubscriber, SparsitySubscriber),
}


class Costs:
    """What subscribers add to the work of a device in one step of a model.

    Parameters
    ----------
    bus : MessageBus
    name : str
        The model.
    metrics : iterable of type
        The subscribers, of all kinds.
    subsample : int
        At which steps.

    Attributes
    ----------
    log, alone : Log
        What happens in a step with and without the subscribers.
    launches, read, written : int
        The difference.
    tensors : int
        Number of tensors measured at a step.
    bytes : int
        Their size, and that of the parameters.
    """

    def __init__(self, bus, name, metrics, subsample=1):
        torch.manual_seed(0)
        model, inputs, labels = MODELS[name]()
        self.model, inputs, labels = model.to("sim"), inputs.to("sim"), labels.to("sim")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.alone = self._step(inputs, labels)
        seen = Counter()
        with Exporter(message_bus=bus, on_error="raise") as exporter:
            exporter.add_modules(self.model)
            for kind in KINDS:
                for metric in metrics:
                    bus.register_subscriber(metric(kind, subsample=subsample, backend="null"))
            known = [f"{kind}_norm2" for kind in KINDS]
            bus.register_subscriber(
                CallbackSubscriber(known, lambda message: seen.update([message.global_step]), backend="null")
            )
            self._step(inputs, labels)
            self.log = self._step(inputs, labels)
        self.tensors = max(seen.values(), default=0)
        self.launches = self.log.launches - self.alone.launches
        self.written = self.log.written - self.alone.written
        self.read = self.log.read - self.alone.read

    def _step(self, inputs, labels):
        train(self.model, self.optimizer, inputs, labels)
        with recorded() as log:
            train(self.model, self.optimizer, inputs, labels)
        return log


@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet"])
@pytest.mark.parametrize("metrics", METRICS)
def test_a_sampled_step_waits_for_nothing_and_copies_once(bus, name, metrics):
    costs = Costs(bus, name, METRICS[metrics])
    assert costs.tensors > 15
    assert costs.log.count("sync") == 0
    assert costs.log.count("d2h") == 1
    assert costs.log.count("h2d") == 0


@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet"])
def test_a_step_that_is_not_sampled_costs_nothing(bus, name):
    costs = Costs(bus, name, METRICS["five metrics"], subsample=1000)
    assert [entry for entry in costs.log if entry.kind != "query"] == costs.alone


def test_norms_take_six_launches_for_ten_tensors(bus):
    costs = Costs(bus, "gpt", METRICS["norms"])
    assert costs.launches <= 0.6 * costs.tensors
