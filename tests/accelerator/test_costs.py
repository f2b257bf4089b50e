"""How much a device has to do for a sampled step, counted on the simulated accelerator."""

from collections import Counter
from functools import cache, partial

import pytest
import torch
from torch import nn

from ikkuna.export import Exporter
from ikkuna.export.messages import MessageBus
from ikkuna.export.subscriber import (
    CallbackSubscriber,
    HistogramSubscriber,
    MeanSubscriber,
    MinMaxSubscriber,
    NormSubscriber,
    RatioSubscriber,
    SparsitySubscriber,
    VarianceSubscriber,
)
from ikkuna.numerics.statistics import needed_fields
from ikkuna.numerics.statistics.device import operators
from tests.accelerator.models import MODELS, train
from tests.simulated_device import recorded

pytestmark = pytest.mark.simulated

KINDS = (
    *("activations", "layer_gradients", "weights", "weight_gradients", "weight_updates"),
    *("biases", "bias_gradients", "bias_updates"),
)
METRICS = {
    "norms": (NormSubscriber,),
    "six metrics": (
        *(NormSubscriber, MeanSubscriber, VarianceSubscriber, MinMaxSubscriber, SparsitySubscriber),
        lambda kind, **options: RatioSubscriber([kind, "weights" if kind != "weights" else "biases"], **options),
    ),
    "exact histograms": (NormSubscriber, partial(HistogramSubscriber, exact=True)),
    "sampled histograms": (NormSubscriber, HistogramSubscriber),
}


class Costs:
    """Work that subscribers add on a device in one step of a model.

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
    outputs, weights : int
        Bytes of all outputs of modules, and of all parameters.
    """

    def __init__(self, bus, name, metrics, subsample=1):
        torch.manual_seed(0)
        model, inputs, labels = MODELS[name]()
        self.model, inputs, labels = model.to("sim"), inputs.to("sim"), labels.to("sim")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.alone = self._step(inputs, labels)
        self.outputs, self.weights = self._outputs(inputs), sum(4 * p.numel() for p in self.model.parameters())
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

    def _outputs(self, inputs):
        sizes = []
        leaves = [module for module in self.model.modules() if not list(module.children())]
        handles = [m.register_forward_hook(lambda m, args, output: sizes.append(4 * output.numel())) for m in leaves]
        self.model(inputs)
        for handle in handles:
            handle.remove()
        return sum(sizes)

    def _step(self, inputs, labels):
        train(self.model, self.optimizer, inputs, labels)
        with recorded() as log:
            train(self.model, self.optimizer, inputs, labels)
        return log


@cache
def of_gpt(metrics):
    """Return the costs of some metrics of a transformer, with kernels; several tests need them."""
    return Costs(MessageBus(metrics), "gpt", METRICS[metrics])


@pytest.mark.parametrize("name", ["mlp", pytest.param("convnet", marks=pytest.mark.slow)])
@pytest.mark.parametrize("metrics", METRICS)
@pytest.mark.parametrize("with_kernels", [False, True])
def test_a_sampled_step_waits_for_nothing_and_copies_once(bus, request, name, metrics, with_kernels):
    if with_kernels:
        request.getfixturevalue("kernels")
    costs = Costs(bus, name, METRICS[metrics])
    assert costs.tensors > 15
    assert costs.log.count("sync") == 0
    assert costs.log.count("d2h") == 1
    assert costs.log.count("h2d") <= 3  # addresses of gradients


@pytest.mark.parametrize("name", ["mlp", "gpt", "convnet"])
def test_a_step_that_is_not_sampled_costs_nothing(bus, name):
    costs = Costs(bus, name, METRICS["six metrics"], subsample=1000)
    assert [entry for entry in costs.log if entry.kind != "query"] == costs.alone


def test_norms_take_few_launches(bus):
    costs = Costs(bus, "gpt", METRICS["norms"])
    assert costs.launches <= 0.6 * costs.tensors


@pytest.mark.usefixtures("kernels")
def test_all_statistics_take_the_launches_of_a_norm():
    norms, all_metrics = of_gpt("norms"), of_gpt("six metrics")
    assert all_metrics.launches == norms.launches <= 0.35 * norms.tensors


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("metrics", ["exact histograms", "sampled histograms"])
def test_histograms_take_few_launches_more_than_norms(metrics):
    """The counts of forward and step are cleared, put together and merged; none of these tensors is large enough for a sample."""
    costs, norms = of_gpt(metrics), of_gpt("norms")
    assert costs.launches == norms.launches + 4 <= 0.4 * costs.tensors
    reads = [sum(x.read for x in c.log if x.name.startswith("measure_")) for c in (costs, norms)]
    assert reads[0] == reads[1]


@pytest.mark.usefixtures("kernels")
def test_each_tensor_is_read_once_and_the_weights_are_copied_once():
    """Weights, gradients and outputs once, and weights and their copy for the updates."""
    costs = of_gpt("six metrics")
    of_kernels = [entry for entry in costs.log if entry.name.startswith("measure_")]
    assert sum(entry.read for entry in of_kernels) == 4 * costs.weights + 2 * costs.outputs
    assert not [entry for entry in costs.log if "foreach_copy" in entry.name]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_a_hundredth_of_the_tensors(bus, dtype):
    """Read: weights, gradients, and weights with their copy; written: the copy, and rows."""
    layer, x = nn.Linear(512, 512, dtype=dtype), torch.randn(2, 512, dtype=dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step():
        with recorded() as log:
            optimizer.zero_grad()
            layer(x).sum().backward()
            optimizer.step()
        return log

    step()
    alone = step()
    with Exporter(message_bus=bus, on_error="raise") as exporter:
        exporter.add_modules(layer)
        for kind in ("weights", "weight_gradients", "weight_updates", "biases", "bias_gradients", "bias_updates"):
            for metric in METRICS["six metrics"]:
                bus.register_subscriber(metric(kind, subsample=1, backend="null"))
        step()
        log = step()
    size = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert 4 * size <= log.read - alone.read <= 4.04 * size
    assert size <= log.written - alone.written <= 1.01 * size
    of_kernels = Counter(entry.name for entry in log if entry.name.startswith(("measure", "merge")))
    assert of_kernels == {"measure_list": 3, "merge_rows": 1}
    assert log.launches - alone.launches == 5  # and one that puts bytes together before the copy


class Reductions:
    """One tensor, measured with torch's operators alone."""

    def __init__(self, fields, dtype=torch.float32):
        x = torch.randn(1000, dtype=dtype)
        with recorded() as log:
            results = operators.reduce(x, needed_fields(fields))
        self.launches, self.written = log.launches, log.written
        self.row = operators.decode([x.item() for x in results], 1000, needed_fields(fields))


@pytest.mark.parametrize(
    ("fields", "launches"), [(("sumsq",), 1), (("sumsq", "m2", "zeros", "min", "max"), 4), (("mean",), 1), (("l1",), 1)]
)
def test_operators_take_one_launch_for_each_reduction(fields, launches):
    reductions = Reductions(fields)
    assert reductions.launches == launches
    assert reductions.written <= 8 * launches
