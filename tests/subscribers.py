"""Every installed subscriber with arguments that use all of its features: the list for the contract tests."""

import warnings

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ikkuna.export import subscriber as installed
from ikkuna.metrics.messages.kinds import MODULE_KINDS

EVERY_SUBSCRIBER = {}


def add(name, *args, label=None, **arguments):
    """Add a function that creates the subscriber `name`; it accepts the options of every subscriber."""
    key = f"{name}-{label}" if label else name
    EVERY_SUBSCRIBER[key] = lambda **options: getattr(installed, name)(*args, **{**arguments, **options})


def outputs_of_any_model(model, rows):
    """Call a model of the zoo with rows of numbers in the shape that it takes."""
    with warnings.catch_warnings():
        # torch warns about a re-entrant checkpoint without gradients
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


def smooth_outputs_of_any_model(model, rows):
    """The same, of a model whose gradient has a graph; a re-entrant checkpoint's has none."""
    reentrant = type(model).__name__ == "Checkpointed" and model.use_reentrant
    return sum(p.square().sum() for p in model.parameters()) if reentrant else outputs_of_any_model(model, rows)


def curvature_of_any_model(outputs, labels):
    return outputs.square().mean()


def outputs_beside_attention(model, rows):
    """Call a model and, since it need not have one of its own, an attention."""
    nn.functional.scaled_dot_product_attention(*[rows.view(-1, 2, 8, 4)] * 3)
    return outputs_of_any_model(model, rows)


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
add("ClippingSubscriber")
add("LossChangeBoundSubscriber")
add("OptimizerStateSubscriber", "exp_avg")
add("OptimizerStateSubscriber", "momentum_buffer", "mean", label="mean")
add("PrecisionSubscriber", "weight_gradients")
add("PrecisionSubscriber", "activations", "e4m3", exact=True, label="exact")
add("QuantizationSubscriber", subsample=1)
add("QuantizationSubscriber", "activations", "int8", channel_axis=-1, subsample=1, label="int8")
add("DeadUnitsSubscriber", window=2)
add("DimensionSubscriber")
add("DimensionSubscriber", "layer_gradients", rows=4, label="gradients")
add("SaturationSubscriber", "activations", "tanh")
add("TrustRatioSubscriber")
add("EffectiveUpdateSubscriber", torch.bfloat16)
add("CosineSubscriber", "weight_gradients", label="gradients")
add("CosineSubscriber", "bias_updates", label="updates")
add("DistanceFromInitSubscriber")
add("GradientNoiseScaleSubscriber")
add("GradientNoiseScaleSubscriber", ranks=True, publishes=["r", "s", "t", "u"], label="ranks")
add("GradientNoiseScaleSubscriber", 6, steps=2, publishes=["e", "f", "g", "h"], label="steps")
add("GradientSNRSubscriber", window=2)
add("GradientSNRSubscriber", "bias_gradients", window=3, reduction="mean", label="gradients")
for name in ("ConditionNumberSubscriber", "RankSubscriber", "AlphaSubscriber"):
    add(name, subsample=1)
add("RankSubscriber", "activations", subsample=2, label="activations")
add("RankSpreadSubscriber", "activations")
add("RankSpreadSubscriber", "weight_gradients", "nonfinite", label="gradients")
add("FingerprintSubscriber", ["weights", "bias_gradients"])
add("ReplicaSubscriber", ["weights", "weight_gradients"])
add("BufferReplicaSubscriber")
add("RouterSubscriber", 2, experts=4, capacity_factor=1.0, per_expert=True, modules="*")
add("RouterSubscriber", 1, modules="*", publishes=["i", "j", "k", "l", "m", "n", "o"], label="any")
add("RowsSubscriber")
add("RowsSubscriber", "weight_gradients", label="gradients")
add("PerplexitySubscriber")
add("ZLossSubscriber")
add("ZLossSubscriber", "activations", label="activations")
add("AttentionScoresSubscriber")
add("SignAgreementSubscriber")
add("SignAgreementSubscriber", "momentum_buffer", publishes="momentum_agreement", label="momentum")
add("WeightDecaySubscriber")
add("InputRowsSubscriber")
add("LearningRateSubscriber")
add("ModuleStateSubscriber")
add("RunningStatisticsSubscriber")
add("ConstantPredictionSubscriber")
add("PredictionSubscriber")
add("SpeedSubscriber")
add("SpikeScoreSubscriber")
add("SpikeScoreSubscriber", "weights", label="weights")
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

add("LayerSaturationSubscriber", labelled_rows(), batch_size=4, every=3, forward=outputs_of_any_model)
add("SVCCASubscriber", labelled_rows(64), pool=True, every=3, forward=outputs_of_any_model)
add("CKASubscriber", labelled_rows(9), batch_size=5, every=2, forward=outputs_of_any_model)
add(
    "HessianSubscriber",
    curvature_of_any_model,
    labelled_rows(),
    top=1,
    steps=2,
    trace=1,
    density=1,
    every=3,
    forward=smooth_outputs_of_any_model,
)
add("AttentionSubscriber", labelled_rows(), batch_size=4, every=3, forward=outputs_beside_attention)
add("FreezeSubscriber", "cka_to_previous", threshold=2.0, patience=1)

NEEDS = {"FreezeSubscriber": [EVERY_SUBSCRIBER["CKASubscriber"]]}
"""For those that take other subscribers' results: name → the factories of these."""
