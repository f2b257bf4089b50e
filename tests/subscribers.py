"""Every installed subscriber, each in a way that exercises all it takes: the list that contract tests run over."""

import warnings

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ikkuna.export import subscriber as installed
from ikkuna.export.messages.kinds import MODULE_KINDS

EVERY_SUBSCRIBER = {}


def add(name, *args, label=None, **arguments):
    """Add one way to make the subscriber `name`; factories take what every subscriber takes."""
    key = f"{name}-{label}" if label else name
    EVERY_SUBSCRIBER[key] = lambda **options: getattr(installed, name)(*args, **{**arguments, **options})


def outputs_of_any_model(model, rows):
    """Call a model of the zoo with rows of numbers in the shape that it takes."""
    with warnings.catch_warnings():
        # torch's, about a re-entrant checkpoint without gradients, whoever evaluates it
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
        return _outputs(model, rows)


def _outputs(model, rows):
    modules = list(model.modules())
    if any(isinstance(module, nn.Embedding) for module in modules):
        return model((rows[:, :9].abs() * 3).long() % 10)
    if any(isinstance(module, nn.Conv2d) for module in modules):
        return model(rows.view(-1, 1, 8, 8))
    first = next(module for module in modules if hasattr(module, "in_features"))
    return model(rows[:, : first.in_features])


def labelled_rows(n=7):
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(n, 64, generator=generator), torch.randint(3, (n,), generator=generator))


for kind in MODULE_KINDS:
    for name in (
        *("NormSubscriber", "MeanSubscriber", "VarianceSubscriber", "SumSubscriber", "MinMaxSubscriber"),
        *("SparsitySubscriber", "NonFiniteSubscriber", "MomentsSubscriber"),
    ):
        add(name, kind, label=kind)
for kind in ("activations", "weight_gradients"):
    add("HistogramSubscriber", kind, subsample=1, label=kind)
    add("PercentileSubscriber", kind, label=kind)
    add("MessageMeanSubscriber", kind, label=kind)
add("NormSubscriber", "weights", p=3, label="p3")
add("NonFiniteSubscriber")
add("HistogramSubscriber", "weights", subsample=1, exact=True, label="exact")
add("PercentileSubscriber", "weights", percentiles=50, exact=True, label="exact")
add("SpectralNormSubscriber")
add("SpectralNormSubscriber", "weight_updates", conv="operator", input_size=(8, 8), label="operator")
add("RatioSubscriber", ["weight_updates", "weights"])
add("GlobalNormSubscriber")
add("OptimizerStateSubscriber", "exp_avg")
add("OptimizerStateSubscriber", "momentum_buffer", "mean", label="mean")
add("PrecisionSubscriber", "weight_gradients")
add("PrecisionSubscriber", "activations", "e4m3", exact=True, label="exact")
add("DeadUnitsSubscriber", window=2)
add("SaturationSubscriber", "activations", "tanh")
add("TrustRatioSubscriber")
add("EffectiveUpdateSubscriber", torch.bfloat16)
add("CosineSubscriber", "weight_gradients", label="gradients")
add("CosineSubscriber", "bias_updates", label="updates")
add("DistanceFromInitSubscriber")
add("GradientNoiseScaleSubscriber")
add("GradientNoiseScaleSubscriber", 6, steps=2, publishes=["e", "f", "g", "h"], label="steps")
add("GradientSNRSubscriber", window=2)
add("GradientSNRSubscriber", "bias_gradients", window=3, reduction="mean", label="gradients")
for name in ("ConditionNumberSubscriber", "RankSubscriber", "AlphaSubscriber"):
    add(name, subsample=1)
add("RankSubscriber", "activations", subsample=2, label="activations")
add("PerplexitySubscriber")
add("LearningRateSubscriber")
add("SpeedSubscriber")
add("StatisticsSubscriber")
add("StatisticsSubscriber", ["weight_updates", "bias_updates"], exact=True, label="exact")
add("GateSubscriber")
add("GateSubscriber", ["biases", "bias_gradients"], label="biases")
add("TimestepGradientSubscriber", (0, -1, -3), batch_first=True)
add("TimestepGradientSubscriber", modules="*", publishes=["a", "b"], label="any")
add("LossSubscriber")
add("TrainAccuracySubscriber")
add("TrainAccuracySubscriber", k=2, beta=0.9, label="running")
add(
    "TestAccuracySubscriber",
    labelled_rows(),
    batch_size=4,
    every=2,
    forward=outputs_of_any_model,
)

NEEDS = {}
"""For those that take other subscribers' results: name → the factories of these."""
