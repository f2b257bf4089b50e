"""Metrics of the training itself: learning rates, optimizer state, speed, differences between ranks."""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import Message, MessageBatch, NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber, Quantity, SharedStatisticSubscriber, name_results
from ikkuna.numerics.spike_score import SpikeScore
from ikkuna.numerics.statistics import Record
from ikkuna_subscribers._helpers import SampleCount


class LearningRateSubscriber(PlotSubscriber):
    """The learning rates of the optimizers' parameter groups.

    Takes ``batch_finished`` and publishes ``learning_rate``, one series for each group: under the group's ``name`` if it has one,
    otherwise as ``group 0``, numbered over all optimizers of the step.  A single unnamed group has no name.
    It is the rate that the step used, before a scheduler changes it.  Skipped steps and groups without a rate publish nothing.

    Look for: a schedule that differs from the intended one; a rate that never warms up.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> LearningRateSubscriber().publishes
    ('learning_rate',)
    """

    quantity = Quantity(low=0.0, scale="log")

    def __init__(self, **options: Any) -> None:
        options.setdefault("publishes", "learning_rate")
        super().__init__("batch_finished", **options)

    def compute(self, message: NetworkMessage) -> None:
        """Emit the rate of each group."""
        if message.skipped:
            return
        reported = (message.data or {}).get("learning_rates", {})
        rates = {name: rate for name, rate in reported.items() if rate is not None}
        is_single = list(rates) == ["0"]
        for name, rate in rates.items():
            group = f"group {name}" if name.isdigit() else name
            self.emit(message if is_single else replace(message, path=group), rate, self.publishes[0])


class SpikeScoreSubscriber(PlotSubscriber):
    """The spike score of a series: how far each value is above the local trend, in robust deviations.

    Takes ``loss`` or results of other subscribers, one number for each series;
    publishes ``{kind}_spike_score``, without unit, see `ikkuna.numerics.spike_score.SpikeScore`.
    The rule ``loss_spike``, dumps and ``ikkuna why`` use the same score.  The first 16 values publish nothing.
    It is infinite for NaN and Inf.  Every value counts: with a larger `subsample` it is the score of the sampled values.

    Look for: a value above 10, which is a spike.

    Parameters
    ----------
    kind : str
        The kind to score, such as ``"loss"`` or ``"gradients_global_norm"``.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> SpikeScoreSubscriber().publishes
    ('loss_spike_score',)
    >>> SpikeScoreSubscriber("gradients_global_norm", publishes="gradient_spike_score").publishes
    ('gradient_spike_score',)
    """

    quantity = Quantity(scale="signed", larger="bad")
    fields = ("mean",)
    derived = True
    state = ("_scores",)
    state_types = (SpikeScore,)

    def __init__(self, kind: str = "loss", **options: Any) -> None:
        options.setdefault("publishes", f"{kind}_spike_score")
        super().__init__(kind, **options)
        self._scores: dict[str | None, SpikeScore] = {}
        self._step = -1

    def compute_batch(self, batch: MessageBatch) -> None:
        """Emit the scores that are defined; a training that was resumed at an earlier step begins anew."""
        if batch.stamp.global_step < self._step:
            self._scores.clear()
        self._step = batch.stamp.global_step
        values = batch.data if isinstance(batch.data, np.ndarray) else batch.records.mean
        for message, value in zip(batch, values.tolist(), strict=True):
            score = self._scores.setdefault(message.series_name, SpikeScore()).add(value)
            if score == score:
                self.emit(message, score)


_STATE_STATISTICS = {"norm": ("norm2", "sumsq"), "mean": ("mean", "mean")}


class OptimizerStateSubscriber(PlotSubscriber):
    r"""The norm or the mean of a tensor that the optimizer stores for each parameter, such as Adam's moments.

    The norm is :math:`\lVert s \rVert_2`, the mean :math:`\frac 1 n \sum_i s_i`, of the state *s* after the step.
    Takes the kinds ``weight_state_{field}`` and ``bias_state_{field}``, which other metrics can take as well;
    publishes ``weight_state_{field}_norm2`` and ``bias_state_{field}_norm2``, or ``…_mean``, in the unit of the state.
    An optimizer without such a field publishes nothing; a state with a NaN or Inf has NaN.

    Look for: an ``exp_avg_sq`` that jumps and stays high freezes its layer for about a thousand steps;
    a ``momentum_buffer`` much larger than the gradient means that gradients agree from step to step.

    Parameters
    ----------
    field : str
        A key of the optimizer's state: ``exp_avg``, ``exp_avg_sq``, ``momentum_buffer``, ``step`` …
    statistic : {'norm', 'mean'}
        The statistic to publish.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If the statistic is another one, or `field` is not a name.

    Examples
    --------
    >>> OptimizerStateSubscriber("exp_avg").publishes
    ('weight_state_exp_avg_norm2', 'bias_state_exp_avg_norm2')
    """

    quantity = Quantity(scale="log")

    def __init__(self, field: str, statistic: str = "norm", **options: Any) -> None:
        if not isinstance(field, str) or not field.isidentifier():
            raise ConfigError(f"OptimizerStateSubscriber needs a field such as 'exp_avg', got {field!r}")
        if statistic not in _STATE_STATISTICS:
            raise ConfigError(f"OptimizerStateSubscriber needs a statistic 'norm' or 'mean', got {statistic!r}")
        kinds = [f"weight_state_{field}", f"bias_state_{field}"]
        suffix, needed = _STATE_STATISTICS[statistic]
        name_results(options, *(f"{kind}_{suffix}" for kind in kinds))
        super().__init__(kinds, **options)
        self.statistic = statistic
        self.fields = (needed,)

    def compute_batch(self, batch: MessageBatch) -> None:
        """Emit the statistics of all parameters."""
        values = batch.records.l2_norm if self.statistic == "norm" else batch.records.mean
        self.emit_batch(batch, values, self.publishes[self.kinds.index(batch.kind)])


class SpeedSubscriber(PlotSubscriber):
    """The time of a step, samples per second, the peak memory, and the share of the time that ikkuna took.

    A step lasts from the end of the previous step to its own end, waiting for data included, in wall-clock time.
    The first step has no previous one and publishes only its memory.  Steps between samples are not measured.
    A device works asynchronously: there single steps may be wrong, while their mean is right.  Skipped steps publish nothing.

    Takes ``batch_finished``, and the number of samples from ``input_data``; publishes ``step_seconds``, ``samples_per_second``,
    ``monitor_share``, between 0 and 1, and ``peak_memory``, in bytes.
    Samples are counted along the first axis of the first tensor among the network's arguments, over all micro-batches;
    if no such call is seen, ``samples_per_second`` is not published.
    Peak memory is the largest resident size of this process since its start (NaN if the system does not report it),
    and, as a series for each CUDA device, the largest memory allocated to tensors since the start (or since the last reset of this peak).

    Look for: a step much longer than the median, which waits for data; memory that grows without end;
    a `monitor_share` above a few percent: increase `subsample` of the most expensive metric (``exporter.health().seconds``).

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> SpeedSubscriber().publishes
    ('step_seconds', 'samples_per_second', 'monitor_share', 'peak_memory')
    """

    quantity = (
        Quantity("s", low=0.0, larger="bad", is_comparable=False),
        Quantity("1/s", low=0.0, larger="good", is_comparable=False),
        Quantity(low=0.0, high=1.0, scale="share", larger="bad", is_comparable=False),
        Quantity("bytes", low=0.0, larger="bad", is_comparable=False),
    )

    def __init__(self, **options: Any) -> None:
        name_results(options, "step_seconds", "samples_per_second", "monitor_share", "peak_memory")
        super().__init__(["input_data", "batch_finished"], **options)
        self._samples = SampleCount()
        self._peak = (0.0, 0.0)

    def measure(self, message: NetworkMessage) -> Tensor | None:
        """Return the number of samples."""
        return self._samples.measure(message)

    def compute(self, message: NetworkMessage) -> None:
        """Store the number of samples; emit the values when the step is over."""
        if message.kind == "input_data":
            self._samples.add(message)
            return
        samples, calls = self._samples.take()
        if message.skipped:
            return
        step_seconds, samples_per_second, monitor_share, peak_memory = self.publishes
        report = message.data or {}
        if (seconds := report.get("seconds", 0.0)) > 0:
            self.emit(message, seconds, step_seconds)
            if calls:
                self.emit(message, samples / seconds, samples_per_second)
            self.emit(message, report["own_seconds"] / seconds, monitor_share)
        if (used := _largest_use()) != self._peak[0] or not self._peak[1] >= used:
            self._peak = used, resident_peak()  # it takes 50 times as long to read
        self.emit(message, self._peak[1], peak_memory)
        for name, peak in _device_peaks():
            self.emit(replace(message, path=name), peak, peak_memory)


def resident_peak() -> float:
    """Return the largest resident size of this process, in bytes; NaN if the system does not report it.

    On Linux ``getrusage()`` would include the size of the parent process before the fork.

    Examples
    --------
    >>> resident_peak() > 1e6
    True
    """
    with suppress(FileNotFoundError, PermissionError, IndexError), open("/proc/self/status", "rb", 0) as status:
        return float(status.read().partition(b"VmHWM:")[2].split(None, 1)[0]) * 1024  # 1/4 of the time of a text
    return _largest_use()


def _largest_use() -> float:
    try:
        import resource
    except ImportError:  # on Windows
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)  # macOS reports bytes, others KiB


def _device_peaks() -> list[tuple[str, float]]:
    if not torch.cuda.is_initialized():
        return []
    return [(f"cuda:{i}", float(torch.cuda.max_memory_allocated(i))) for i in range(torch.cuda.device_count())]


_SPREADS: dict[str, tuple[tuple[str, ...], Callable[[Record], float]]] = {
    "norm2": (("sumsq",), lambda record: record.l2_norm),
    "rms": (("sumsq",), lambda record: record.rms),
    "mean": (("mean",), lambda record: record.mean),
    "variance": (("m2",), lambda record: record.variance()),
    "largest": (("min", "max"), lambda record: record.linf_norm),
    "sparsity": (("zeros",), lambda record: record.sparsity),
    "nonfinite": (("nans", "infs"), lambda record: float(record.nonfinite)),
}
_RESULTS = ("min", "median", "max", "argmin", "argmax")


class RankSpreadSubscriber(SharedStatisticSubscriber):
    """The smallest, the median and the largest value of a statistic over ranks, and the ranks of the extremes.

    Every other metric describes all ranks together; this one compares the ranks before they are merged, and so finds a faulty device.
    Activations, layer gradients, the loss and inputs are those of a rank's own data.
    Weights and their gradients are equal on all ranks under DDP, where any difference is an error, and shards under FSDP.

    Takes any kind with a tensor; publishes ``{kind}_ranks_{statistic}_min``, ``_median`` and ``_max``, in the unit of the statistic,
    and ``_argmin`` and ``_argmax``, which are ranks.
    If a rank has NaN, all three values are NaN, and both extremes are the first rank with NaN.
    A rank that did not see the tensor is left out; in one process all values are those of this process, and the rank is 0.

    Look for: one rank that is always the extreme, and a largest value far from the median.

    Parameters
    ----------
    kind : str
        The kind to measure.
    statistic : str
        ``"norm2"``, ``"rms"``, ``"mean"``, ``"variance"``, ``"largest"`` (magnitude), ``"sparsity"`` or ``"nonfinite"`` (elements).
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If the statistic is unknown.

    Examples
    --------
    >>> RankSpreadSubscriber("loss", "mean").publishes[-2:]
    ('loss_ranks_mean_argmin', 'loss_ranks_mean_argmax')
    """

    quantity = Quantity(scale="log")
    per_rank = True

    def __init__(self, kind: str, statistic: str = "rms", **options: Any) -> None:
        if statistic not in _SPREADS:
            known = ", ".join(_SPREADS)
            raise ConfigError(f"RankSpreadSubscriber needs one of the statistics {known}, got {statistic!r}")
        self.results = [f"ranks_{statistic}_{result}" for result in _RESULTS]
        super().__init__(kind, **options)
        self.statistic = statistic
        self.fields = _SPREADS[statistic][0]

    def compute(self, message: Message) -> None:
        """Emit the values."""
        assert message.record is not None
        for kind, value in zip(self.publishes, self.values(message.record), strict=True):
            self.emit(message, value, kind)

    def values(self, record: Record) -> tuple[float, float, float, int, int]:
        """Return the three values and the two ranks."""
        value_of = _SPREADS[self.statistic][1]
        ranks = enumerate(record.ranks or (record,))
        return _spread({rank: value_of(own) for rank, own in ranks if own is not None and own.n})


def _spread(values: dict[int, float]) -> tuple[float, float, float, int, int]:
    if undefined := [rank for rank, value in values.items() if math.isnan(value)]:
        return math.nan, math.nan, math.nan, undefined[0], undefined[0]
    lowest, highest = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    return values[lowest], median(values.values()), values[highest], lowest, highest
