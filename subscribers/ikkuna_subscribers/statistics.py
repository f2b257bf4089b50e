"""The statistics of parameters and gradients as one flat dictionary for each step, and as curves."""

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ikkuna.errors import ConfigError, ConfigTypeError
from ikkuna.export.messages import MeasuredStep, ModuleMessage, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber, Quantity, name_results
from ikkuna.numerics.statistics import Record, merge
from ikkuna.numerics.statistics.histogram import SIGMA, Histograms
from ikkuna.store.values import ModuleEntry
from ikkuna.support.modules import is_bias

_PARTS = {
    "weights": "weight/data",
    "biases": "bias/data",
    "weight_gradients": "weight/grad",
    "bias_gradients": "bias/grad",
    "weight_updates": "weight/update",
    "bias_updates": "bias/update",
}
_STATISTICS = ("min", "max", "mean", "std", *(f"percentile/{i}" for i in range(len(SIGMA))))
_DEFAULT_KINDS = ("weights", "biases", "weight_gradients", "bias_gradients")


class StatisticsSubscriber(PlotSubscriber):
    r"""Extrema, mean, standard deviation, percentiles and zeros of parameters and gradients, for each layer and for all layers.

    These are the statistics of `ikkuna.monitor`, during training.  The standard deviation is :math:`\sqrt{M_2 / n}`;
    the percentiles are those at -3 to 3 standard deviations of a normal distribution, with a relative error of at most one eighth
    (see `PercentileSubscriber`).

    Takes kinds of parameters; publishes ``weight_data_min``, ``bias_grad_percentile_3``, ``weight_sparsity_zeros`` and the like,
    in the unit of x, for each layer, all its parameters pooled, and for the whole network, without normalisation layers.
    After each step `report` is called with all of them under the names ``{model}/{layer}/{param}/{attr}/{statistic}``;
    the layer of the whole network is ``*``.  These names are the same at every step, with NaN for missing values.
    If a NaN or Inf is among the elements, all their statistics are NaN.

    Look for: in `percentile_fan`, which draws a list of such reports, bands that open or close from layer to layer.

    Parameters
    ----------
    kinds : str or list of str
        Kinds of parameters; by default weights and biases with their gradients.
    report : callable, optional
        A function that takes the dictionary of a step, such as ``log.append`` or ``wandb.log``.
    model : str
        The model's name in the keys of the dictionary.
    exact : bool
        Whether percentiles count all elements; by default they use a random sample of 65,536.
    include_norm : bool
        Whether normalisation layers count in the whole network.
    **options : Any
        See `Subscriber`.

    Attributes
    ----------
    entry : dict of str to float
        The dictionary of the latest step.

    Raises
    ------
    ConfigError
        If a kind is not one of parameters, or `report` is not callable.

    Examples
    --------
    >>> StatisticsSubscriber("weights").publishes[:4]
    ('weight_data_min', 'weight_data_max', 'weight_data_mean', 'weight_data_std')
    """

    quantity = Quantity(scale="signed")

    def __init__(
        self,
        kinds: str | Sequence[str] = _DEFAULT_KINDS,
        *,
        report: Callable[[dict[str, float]], object] | None = None,
        model: str = "model",
        exact: bool = False,
        include_norm: bool = False,
        **options: Any,
    ) -> None:
        chosen = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if wrong := [kind for kind in chosen if kind not in _PARTS]:
            raise ConfigError(f"StatisticsSubscriber needs kinds of parameters ({', '.join(_PARTS)}), got {wrong[0]!r}")
        if report is not None and not callable(report):
            raise ConfigTypeError(f"report needs a function of a dictionary, got {type(report).__name__}")
        keys = [key for kind in chosen for key in _keys(kind)]
        name_results(options, *(key.replace("/", "_") for key in keys))
        super().__init__(chosen, **options)
        self._kind_of_key = dict(zip(keys, self.publishes, strict=True))
        self.report = report
        self.model = model
        self.exact = exact
        self.include_norm = include_norm
        self.fields = ("m2", "min", "max", "zeros", "codes" if exact else "sampled_codes")
        self.entry: dict[str, float] = {}

    def compute_step(self, step: MeasuredStep) -> None:
        """Pool the parameters of each module, emit the statistics of each layer and of all layers, and report them."""
        stamp, records = step.stamp, dict[tuple[str, str], Record]()  # by kind and module
        for message in chain.from_iterable(step):
            place = message.kind, message.module
            records[place] = merge(records.get(place, Record()), message.record)
        layers = [entry for entry in self.network if entry.parameters and self.subscription.matches(entry.name)]
        found: list[tuple[ModuleMessage | NetworkMessage, str, Record]] = []
        for kind in self.kinds:
            counted = [layer.name for layer in layers if self.include_norm or "Norm" not in layer.class_name]
            pooled = merge(*(records[kind, name] for name in counted if (kind, name) in records))
            found.append((NetworkMessage(stamp, kind), "*", pooled))
            for layer in layers:
                if _owns(layer, kind):
                    of_layer = ModuleMessage(stamp, kind, module=layer.name, name=layer.name)
                    found.append((of_layer, layer.name, records.get((kind, layer.name), Record())))
        entry: dict[str, float] = {}
        for (message, name, record), cuts in zip(found, self._cuts([record for *_, record in found]), strict=True):
            for key, value in _statistics(message.kind, record, cuts).items():
                entry[f"{self.model}/{name}/{key}"] = value
                if record.n:
                    self.emit(message, value, self._kind_of_key[key])
        self.entry = entry
        if self.report is not None and entry:
            self.report(entry)

    def _cuts(self, records: list[Record]) -> list[list[float]]:
        """Return the percentiles of each record, computed together; NaN for no elements."""
        percentiles = np.full((len(records), len(SIGMA)), math.nan)
        filled = [i for i, record in enumerate(records) if record.n]
        if filled:
            name = "codes" if self.exact else "sampled_codes"
            counts, low, high = ([getattr(records[i], field) for i in filled] for field in (name, "min", "max"))
            histograms = Histograms(counts, np.array(low, np.float64), np.array(high, np.float64))
            percentiles[filled] = histograms.quantile([q / 100 for q in SIGMA]).T
        found: list[list[float]] = percentiles.tolist()
        return found


def _statistics(kind: str, record: Record, cuts: list[float]) -> dict[str, float]:
    if not record.n:
        return dict.fromkeys(_keys(kind), math.nan)
    zeros = math.nan if record.zeros is None else float(record.zeros)
    if record.nonfinite or record.min is None or record.max is None:
        values = [math.nan] * len(_STATISTICS)
    else:
        values = [record.min, record.max, record.mean, math.sqrt(record.variance()), *cuts]
    return dict(zip(_keys(kind), [*values, zeros], strict=False))  # only weights and biases have zeros


def _keys(kind: str) -> list[str]:
    part = _PARTS[kind]
    param, attr = part.split("/")
    zeros = [f"{param}/sparsity/zeros"] if attr == "data" else []
    return [*(f"{part}/{statistic}" for statistic in _STATISTICS), *zeros]


def _owns(layer: ModuleEntry, kind: str) -> bool:
    """Return whether a layer has a parameter of this kind; the last part of a parameter's name decides whether it is a bias."""
    return any(is_bias(path) == kind.startswith("bias") for path, _ in layer.parameters)
