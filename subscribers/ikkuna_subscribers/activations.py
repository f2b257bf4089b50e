"""Metrics of activations and of the state of modules: dead and saturated units, running statistics, training flags."""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ikkuna.errors import ConfigError
from ikkuna.export.messages import Message, ModuleMessage, NetworkMessage, Stamp
from ikkuna.export.subscriber import PlotSubscriber, Quantity, name_results
from ikkuna.numerics.layers import (
    active_units,
    count_saturated,
    dead_share,
    dormant_share,
    running_statistics_distance,
    saturation_threshold,
    unit_counters,
)
from ikkuna.support.modules import NamedParameter, embedding_pairs, have_same_values, parameters_of
from ikkuna_subscribers._helpers import require_integers


class DeadUnitsSubscriber(PlotSubscriber):
    r"""The share of a layer's units that are never active, and of those that are far less active than the other units.

    A unit is a channel: the last axis of a tensor with up to three axes, the second axis of one with more.
    Over a window of steps it is *dead* if :math:`\#(h > 0)` is less than a share `inactivity` of its positions, and *dormant* if
    :math:`E|h_c| / \operatorname{mean}_k E|h_k| \le \tau`.  The first is for rectified layers; the second suits every activation function.

    Takes any kind with a tensor; choose the layers with `modules`.
    Publishes ``{kind}_dead`` and ``{kind}_dormant``, between 0 and 1, from the first step on, over at most `window` samples.
    Elements that are not finite are left out; units without a finite element are left out, and without any unit the value is NaN.
    A tensor without axes publishes nothing.  Of several calls in a step, those with another number of units than the first are left out.
    For each layer it keeps ``3 * window`` float64 numbers per unit, on the host.
    With ``inactivity=0, tau=None`` only the largest element of each unit is read, in a single pass over at most 8192 positions of a unit;
    a unit with a NaN then counts as active.

    Look for: above one half the layer is broken, and dead units do not recover; a jump follows a step that was too large.

    Parameters
    ----------
    kind : str
        The kind to measure.
    window : int
        The number of samples over which activity is counted.
    inactivity : float
        The share of positions, in [0, 1], below which a unit is dead; with 0 only a unit that is never active.
    tau : float, optional
        The score at or below which a unit is dormant; with ``None`` only ``{kind}_dead`` is published.
    channel_axis : int, optional
        The axis of units, if it is another one.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If a number is out of range.

    References
    ----------
    G. Sokar et al., The dormant neuron phenomenon in deep reinforcement learning, 2023.

    Examples
    --------
    >>> DeadUnitsSubscriber(modules="*relu*").publishes
    ('activations_dead', 'activations_dormant')
    """

    quantity = Quantity(low=0.0, high=1.0, scale="share", zero="good", larger="bad")
    state = ("_windows",)

    def __init__(
        self,
        kind: str = "activations",
        *,
        window: int = 10,
        inactivity: float = 0.01,
        tau: float | None = 0.025,
        channel_axis: int | None = None,
        **options: Any,
    ) -> None:
        require_integers("DeadUnitsSubscriber", window=window)
        if not 0 <= inactivity <= 1 or not (tau is None or tau >= 0):
            raise ConfigError(
                f"DeadUnitsSubscriber needs an inactivity in [0, 1] and tau >= 0, got {inactivity!r} and {tau!r}"
            )
        name_results(options, f"{kind}_dead", *([] if tau is None else [f"{kind}_dormant"]))
        super().__init__(kind, **options)
        self.window = window
        self.inactivity = inactivity
        self.tau = tau
        self.channel_axis = channel_axis
        self._units: dict[str | None, tuple[Stamp, int]] = {}
        self._windows: dict[str | None, deque[NDArray[np.float64]]] = {}

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the counters of every unit."""
        axis = self.channel_axis
        if axis is not None and not -message.data.ndim <= axis < message.data.ndim:
            return None
        counters = self._counters(message.data, axis)
        stamp, units = self._units.get(message.series_name, (None, 0))
        if not counters.numel() or (stamp == message.stamp and units != counters.shape[1]):
            return None  # counters of another number of units cannot be added to those of this step
        self._units[message.series_name] = message.stamp, counters.shape[1]
        return counters

    def _counters(self, activations: Tensor, axis: int | None) -> Tensor:
        return active_units(activations, axis).unsqueeze(0) if self._is_fast else unit_counters(activations, axis)

    @property
    def _is_fast(self) -> bool:
        return self.tau is None and self.inactivity == 0

    def compute(self, message: ModuleMessage) -> None:
        """Emit the shares."""
        window = self._windows.setdefault(message.series_name, deque(maxlen=self.window))
        if window and window[-1].shape != message.data.shape:
            window.clear()
        window.append(message.data.copy())
        if self._is_fast:
            dead = np.logical_not(window).all(axis=(0, 1)) if len(window) > 1 else window[0][0] == 0
            self.emit(message, float(dead.mean()), self.publishes[0])
            return
        counters = torch.from_numpy(np.sum(window, axis=0))
        self.emit(message, dead_share(counters, self.inactivity).item(), self.publishes[0])
        if self.tau is not None:
            self.emit(message, dormant_share(counters, self.tau).item(), self.publishes[1])


class SaturationSubscriber(PlotSubscriber):
    r"""The share of elements for which the slope of tanh or sigmoid is below *t*.

    For outputs: :math:`|y| > \sqrt{1 - t}` for tanh, :math:`|y - \tfrac 1 2| > \sqrt{\tfrac 1 4 - t}` for sigmoid;
    for inputs, with ``of="input"``: :math:`|x| > \operatorname{arcosh} t^{-1/2}` or :math:`\operatorname{arcosh}(1/2t - 1)`.

    Takes any kind with a tensor; choose the layers with `modules`.  Publishes ``{kind}_saturation``, between 0 and 1.
    Over several calls and micro-batches it is the share of all elements together.
    NaN elements are left out, infinite ones are saturated; without an element it is NaN.

    Look for: above one half almost no gradient passes the layer; a layer that saturates from the start has too large initial weights.

    Parameters
    ----------
    kind : str
        The kind to measure.
    function : {'tanh', 'sigmoid'}
        The activation function of the layers.
    slope : float
        The derivative below which an element is saturated; the largest derivative is 1 for tanh and 1/4 for sigmoid.
    of : {'output', 'input'}
        Whether `kind` is the output or the input of the function.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If the function is unknown, or the slope is out of range.

    Examples
    --------
    >>> SaturationSubscriber("activations", "tanh", modules="*tanh*").publishes
    ('activations_saturation',)
    """

    quantity = Quantity(low=0.0, high=1.0, scale="share", zero="good", larger="bad")

    def __init__(
        self,
        kind: str = "activations",
        function: str = "tanh",
        *,
        slope: float = 0.05,
        of: str = "output",
        **options: Any,
    ) -> None:
        saturation_threshold(function, slope, of)
        options.setdefault("publishes", f"{kind}_saturation")
        super().__init__(kind, **options)
        self.function = function
        self.slope = slope
        self.of = of

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the numbers of saturated and of all elements."""
        return count_saturated(message.data, self.function, self.slope, self.of)

    def compute(self, message: ModuleMessage) -> None:
        """Emit the share."""
        saturated, n = message.data
        self.emit(message, saturated / n if n else math.nan)


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class RunningStatisticsSubscriber(PlotSubscriber):
    r"""How far the running mean and variance of a batch norm are from those of the batch.

    Evaluation uses the running statistics, so a distance means that the network computes something else there than in training.
    See `ikkuna.numerics.layers.running_statistics_distance`; at most 4,096 positions of each channel are read.
    A layer in evaluation mode, one without running statistics, and a batch with fewer than 8 samples publish nothing.

    Takes ``layer_inputs`` of batch-norm layers; publishes ``running_mean_distance``, in running standard deviations,
    and ``running_variance_distance``, the magnitude of a logarithm.  Several calls and micro-batches are averaged.

    Look for: distances that stay large after the first hundred steps: the momentum is too small,
    or other data, such as unnormalised images, pass through the layer in training mode.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> RunningStatisticsSubscriber().publishes
    ('running_mean_distance', 'running_variance_distance')
    """

    quantity = Quantity("deviations", low=0.0, scale="log", zero="good", larger="bad")
    reads_model = True

    def __init__(self, **options: Any) -> None:
        name_results(options, "running_mean_distance", "running_variance_distance")
        super().__init__("layer_inputs", **options)
        self._layers: dict[str, nn.Module] | None = None

    def _layer(self, name: str) -> nn.Module | None:
        if self._layers is None:
            self._layers = {n.name: n.module for n in self.modules if isinstance(n.module, _BATCH_NORMS)}
        return self._layers.get(name)

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the number of calls, and the sums of both squared distances."""
        layer = self._layer(message.module)
        if layer is None or not layer.training or message.path:
            return None
        buffers = layer._buffers
        mean, variance = buffers.get("running_mean"), buffers.get("running_var")
        x = message.data
        if mean is None or variance is None or x.ndim < 2 or len(x) < 8 or x.shape[1] != len(mean):
            return None
        return torch.cat([mean.new_ones(1), running_statistics_distance(x, mean, variance)]).double()

    def compute(self, message: ModuleMessage) -> None:
        """Emit both distances."""
        calls, *sums = message.data
        for kind, total in zip(self.publishes, sums, strict=True):
            self.emit(message, math.sqrt(total / calls) if total >= 0 else math.nan, kind)


class _Pair(NamedTuple):
    """An embedding and an output layer that share a weight."""

    name: str
    embedding: nn.Module
    layer: nn.Module

    @property
    def is_untied(self) -> bool:
        return self.embedding._parameters.get("weight") is not self.layer._parameters.get("weight")


class ModuleStateSubscriber(PlotSubscriber):
    """The share of modules in evaluation mode, the weights that are trainable, and tied weights that came apart.

    The flags are read when the network is called.

    Takes ``input_data`` as the sign of a call; publishes ``evaluation_mode`` of the whole network, a share between 0 and 1,
    ``weight_requires_grad``, 0 or 1 for each weight, and ``untied_weights`` for output layers, 1 if the weight is another tensor than that
    of an embedding although both were one tensor at the first sample, or two with equal values at registration; else 0.
    A weight is published at the first sample and when its flag changes.

    Look for: an ``evaluation_mode`` of 1 in training, because dropout is then off and batch norm uses old statistics;
    a weight that is not trainable between two that are;
    a weight that is no longer tied, because both copies are then trained apart.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> ModuleStateSubscriber().publishes
    ('evaluation_mode', 'weight_requires_grad', 'untied_weights')
    """

    quantity = Quantity(low=0.0, high=1.0, scale="share")
    merge = "max"
    reads_model = True
    state = ("_shown",)

    def __init__(self, **options: Any) -> None:
        name_results(options, "evaluation_mode", "weight_requires_grad", "untied_weights")
        super().__init__("input_data", **options)
        self._weights: tuple[NamedParameter, ...] | None = None
        self._pairs: tuple[_Pair, ...] | None = None
        self._shown: dict[str, bool] = {}

    def begin(self) -> None:
        """Find the weights that are tied, and those that are copies; the comparison of values waits for the device."""
        self._pairs = tuple(self._find_pairs(compares=True))

    def _find_pairs(self, compares: bool) -> Iterator[_Pair]:
        modules = ((named.name, named.module) for named in self.modules)
        for _, embedding, name, layer in embedding_pairs(modules):
            a, b = embedding._parameters["weight"], layer._parameters["weight"]
            if a is b or (compares and a is not None and b is not None and have_same_values(a, b)):
                yield _Pair(name, embedding, layer)

    def _parameters(self) -> tuple[NamedParameter, ...]:
        if self._weights is None:
            self._weights = tuple(named for named in parameters_of(self.modules) if not named.is_bias)
        return self._weights

    def measure(self, message: NetworkMessage) -> Tensor | None:
        """Return the share of modules in evaluation mode, a flag for each weight, and one for each pair of tied weights."""
        modules = self.modules
        if message.path or not modules:
            return None
        if self._pairs is None:
            self._pairs = tuple(self._find_pairs(compares=False))
        share = sum(not named.module.training for named in modules) / len(modules)
        flags = [float(named.parameter.requires_grad) for named in self._parameters()]
        untied = [float(pair.is_untied) for pair in self._pairs]
        return torch.tensor([share, *flags, *untied], dtype=torch.float64, device="cpu")

    def compute(self, message: Message) -> None:
        """Emit the share, and the flags that have changed."""
        mode, trainable, untied = self.publishes
        share, *flags = message.data
        self.emit(message, share, mode)
        weights, pairs = self._parameters(), self._pairs or ()
        for named, flag in zip(weights, flags, strict=False):
            if self._shown.get(named.name) != bool(flag):
                self._shown[named.name] = bool(flag)
                self.emit(self._message(message, named, trainable), flag, trainable)
        for pair, flag in zip(pairs, flags[len(weights) :], strict=False):
            key = f"{untied} {pair.name}"
            if self._shown.get(key) != bool(flag):
                self._shown[key] = bool(flag)
                self.emit(ModuleMessage(message.stamp, untied, module=pair.name, name=pair.name), flag, untied)

    def _message(self, message: Message, named: NamedParameter, kind: str) -> ModuleMessage:
        return ModuleMessage(message.stamp, kind, module=named.module, path=named.path, name=named.name)
