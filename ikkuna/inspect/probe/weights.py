"""Weights of layers, and measures of channels and gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ikkuna.errors import ConfigError
from ikkuna.inspect.probe.capture import LayerId, find_layer, find_layers, leaves
from ikkuna.inspect.probe.outputs import shape_result
from ikkuna.numerics.elements import as_float64, to_array
from ikkuna.support.modules import named_modules, named_parameters
from ikkuna.support.undisturbed import undisturbed

_STATS: Mapping[str, Callable[[Tensor], Tensor]] = {"max": torch.max, "mean": torch.mean}
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def get_weights(model: nn.Module, layers: LayerId | Sequence[LayerId], *, as_dict: bool = False) -> Any:
    """Return copies of the parameters of `layers` by name; a parametrised tensor is returned as the layer uses it.

    Parameters
    ----------
    model : nn.Module
        The model; wrappers are skipped.
    layers : int, str, nn.Module or sequence of them
        See :func:`~ikkuna.inspect.probe.capture.find_layer`.  A string such as ``'gru/weight_hh_l0'`` selects one parameter by
        its name or a part of it.
    as_dict : bool
        Return a dictionary by layer name.

    Returns
    -------
    dict, Tensor, list or dict of them
        For one layer a dictionary by parameter name, for one parameter a tensor, for several layers a list in their
        order.

    Raises
    ------
    KeyError
        If a layer or a parameter does not exist.

    Examples
    --------
    >>> {name: tuple(value.shape) for name, value in get_weights(nn.Linear(3, 2), "linear").items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    single = isinstance(layers, int | str | nn.Module)
    selected: Sequence[Any] = [layers] if single else layers  # type: ignore[assignment]
    if layers == "*":
        selected = [name for name, module in leaves(model).items() if any(True for _ in module.parameters())]
    results = dict(_weights(model, each) for each in selected)
    return shape_result(results, layers, as_dict)


def _weights(model: nn.Module, layer: LayerId) -> tuple[str, Any]:
    text, _, part = layer.partition("/") if isinstance(layer, str) else (layer, "", "")
    name, module = find_layer(model, text)
    tensors = effective(module)
    if not part:
        return name, tensors
    matching = [part] if part in tensors else [key for key in tensors if part in key]
    if not matching:
        raise KeyError(f"{name!r} has no parameter {part!r}; available: {', '.join(tensors) or 'none'}")
    return f"{name}/{matching[0]}", tensors[matching[0]]


def effective(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters in a module by name, with parametrised tensors as the module uses them."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, child in named_modules(module):
        prefix = f"{name}." if name else ""
        for own, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                tensors[prefix + own] = parameter.detach().clone()
        if is_parametrized(child):
            keys = child.get_submodule("parametrizations")._modules
            with undisturbed(child):  # a spectral norm updates its buffers when the weight is read
                tensors |= {prefix + key: getattr(child, key).clone() for key in keys}
    return tensors


def weights_norm(
    model: nn.Module,
    layers: LayerId | Sequence[LayerId] = "*",
    history: Mapping[str, Any] | None = None,
    *,
    p: float = 2,
    stats: Mapping[str, Callable[[Tensor], Tensor]] = _STATS,
    axis: int | None = None,
    omit: str | Sequence[str] = (),
) -> dict[str, dict[str, dict[str, list[float]]]]:
    r"""Return statistics of the norm :math:`(\sum |w|^p)^{1/p}` of each unit's weights, appended to earlier results.

    Parameters
    ----------
    model : nn.Module
        The model; wrappers are skipped.
    layers : int, str, nn.Module or sequence of them
        See :func:`~ikkuna.inspect.probe.capture.find_layer`.
    history : dict, optional
        The result of an earlier call.  A copy of it is extended by one value per statistic.
    p : float
        Order of the norm.
    stats : mapping of str to callable
        Statistics of the norms of a parameter's units; by default ``max`` and ``mean``.
    axis : int, optional
        The axis of the units.  By default 1 for a transposed convolution and 0 otherwise (output units; tokens of an
        embedding).
    omit : str or sequence of str
        Skip parameters whose name contains one of these strings.

    Returns
    -------
    dict
        ``result[layer][parameter][statistic]`` is a list with one value per call.

    Examples
    --------
    >>> layer = nn.Linear(2, 2, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[1.0, 3.0], [2.0, 4.0]]))
    >>> weights_norm(layer, "linear", p=1)
    {'': {'weight': {'max': [6.0], 'mean': [5.0]}}}
    """
    omitted = [omit] if isinstance(omit, str) else list(omit)
    before = history or {}
    result = {
        layer: {k: {s: list(v) for s, v in d.items()} for k, d in kinds.items()} for layer, kinds in before.items()
    }
    for name, module in find_layers(model, layers):
        for key, tensor in effective(module).items():
            if not any(word in key for word in omitted):
                norms = _unit_norms(tensor, _axis(module, key, axis), p)
                series = result.setdefault(name, {}).setdefault(key, {})
                for stat, function in stats.items():
                    series.setdefault(stat, []).append(float(function(norms)))
    return result


def _axis(module: nn.Module, key: str, axis: int | None) -> int:
    if axis is not None:
        return axis
    return 1 if isinstance(module, _TRANSPOSED) and key == "weight" else 0


def _unit_norms(tensor: Tensor, axis: int, p: float) -> Tensor:
    exact = as_float64(tensor)
    if exact.ndim < 2:
        return exact.abs().reshape(-1)
    norms: Tensor = torch.linalg.vector_norm(exact.movedim(axis, 0).flatten(1), p, dim=1)
    return norms


@dataclass(frozen=True)
class Penalty:
    r"""The loss term of one parameter due to regularisation: :math:`\lambda_1 \sum |w| + \lambda_2 \sum w^2`.

    Parameters
    ----------
    l1, l2 : float
        The factors :math:`\lambda_1` and :math:`\lambda_2`.
    kind : str
        ``'loss'``, or ``'decoupled'`` for weight decay without an equivalent loss term.
    loss : float
        The value; NaN if decoupled.
    """

    l1: float
    l2: float
    kind: str
    loss: float


def weight_penalties(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    penalties: Mapping[str, tuple[float, float]] | None = None,
) -> dict[str, Penalty]:
    r"""Return the loss term of weight decay, or of given penalties, for each parameter that has one.

    The ``weight_decay`` :math:`\lambda` of an optimizer adds :math:`\lambda w` to the gradient, like a loss term
    :math:`(\lambda/2) \sum w^2`.  The weight decay of AdamW, Adafactor, Muon and Lion is decoupled from the loss.

    Parameters
    ----------
    model : nn.Module
        The model; wrappers are skipped.
    optimizer : torch.optim.Optimizer, optional
        The optimizer whose ``weight_decay`` is read.
    penalties : mapping of str to tuple, optional
        Factors (l1, l2) for the parameters whose name contains the key; they are added to those of the optimizer.

    Raises
    ------
    ConfigError
        If neither `optimizer` nor `penalties` is given.

    Examples
    --------
    >>> layer = nn.Linear(2, 1, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[3.0, 4.0]]))
    >>> round(weight_penalties(layer, torch.optim.SGD(layer.parameters(), lr=1, weight_decay=0.1))["weight"].loss, 6)
    1.25
    """
    if optimizer is None and not penalties:
        raise ConfigError("weight_penalties needs an optimizer, penalties by parameter name, or both")
    result = {}
    decays = {} if optimizer is None else _decays(optimizer)
    for name, parameter in named_parameters(model):
        decay, decoupled = decays.get(id(parameter), (0.0, False))
        l1 = sum(pair[0] for key, pair in (penalties or {}).items() if key in name)
        l2 = sum(pair[1] for key, pair in (penalties or {}).items() if key in name) + decay / 2
        if l1 or l2:
            result[name] = _penalty(as_float64(parameter), l1, l2, decoupled and decay > 0)
    return result


def _penalty(w: Tensor, l1: float, l2: float, decoupled: bool) -> Penalty:
    loss = l1 * float(w.abs().sum()) + l2 * float((w * w).sum())
    return Penalty(l1, l2, "decoupled" if decoupled else "loss", float("nan") if decoupled else loss)


_DECOUPLED = ("AdamW", "Adafactor", "Muon", "Lion")
"""Parts of the names of optimizers, of torch and others, whose weight decay is decoupled and has no flag for that."""


def _decays(optimizer: torch.optim.Optimizer) -> dict[int, tuple[float, bool]]:
    decays = {}
    for group in optimizer.param_groups:
        named = any(name in type(optimizer).__name__ for name in _DECOUPLED)
        decoupled = group.get("decoupled_weight_decay", False) or named
        for parameter in group["params"]:
            decays[id(parameter)] = (float(group.get("weight_decay", 0.0)), bool(decoupled))
    return decays


def detect_nans(data: Any, include_inf: bool = True) -> str | None:
    """Return the share of NaN (and infinite) elements as text, or ``None`` if there are none.

    A share below 0.1 % is given as a count.

    Parameters
    ----------
    data : Tensor, ndarray or list
        The elements to count.
    include_inf : bool
        Count infinite elements too.

    Examples
    --------
    >>> detect_nans([float("nan"), float("inf"), -float("inf"), 0.0])
    '25.0% NaN, 50.0% Inf'
    """
    values = to_array(data)
    counts = {"NaN": int(np.isnan(values).sum()), "Inf": int(np.isinf(values).sum()) if include_inf else 0}
    shares = [_share(count, values.size, word) for word, count in counts.items() if count]
    return ", ".join(shares) or None


def _share(count: int, total: int, word: str) -> str:
    percent = 100 * count / total
    return f"{percent:.1f}% {word}" if percent >= 0.1 else f"{count} of {total} {word}"


@dataclass(frozen=True)
class ChannelHealth:
    """The dead and the exploding channels of a layer.

    Parameters
    ----------
    channels : int
        Number of channels.
    dead : tuple of int
        Positions of the channels whose magnitude never exceeds the lower limit.
    exploding : tuple of int
        Positions of the channels that exceed the upper limit or contain NaN or infinite elements.
    """

    channels: int
    dead: tuple[int, ...]
    exploding: tuple[int, ...]

    @property
    def dead_fraction(self) -> float:
        """Share of dead channels; NaN if there are no channels."""
        return len(self.dead) / self.channels if self.channels else float("nan")

    @property
    def exploding_fraction(self) -> float:
        """Share of exploding channels; NaN if there are no channels."""
        return len(self.exploding) / self.channels if self.channels else float("nan")


def channel_health(x: Any, dead: float = 1e-8, exploding: float = 1e3, channel_axis: int = -1) -> ChannelHealth:
    """Return which channels of `x` are dead or exploding.

    Parameters
    ----------
    x : Tensor or ndarray
        Outputs or gradients, such as (sample, time, channel).
    dead, exploding : float
        The limits of the magnitude.
    channel_axis : int
        The channel axis; 1 for convolutions.

    Examples
    --------
    >>> channel_health([[0.0, 1.0, 5e3], [0.0, 2.0, 1.0]])
    ChannelHealth(channels=3, dead=(0,), exploding=(2,))
    """
    channels = _by_channel(x, channel_axis)
    largest = np.abs(channels).max(axis=1, initial=0.0)
    known = np.isfinite(largest)
    dead_at = np.flatnonzero(known & (largest <= dead) & (channels.shape[1] > 0))
    return ChannelHealth(
        channels.shape[0], tuple(map(int, dead_at)), tuple(map(int, np.flatnonzero(~known | (largest > exploding))))
    )


def channel_correlation(x: Any, channel_axis: int = -1) -> Tensor:
    """Return Pearson's correlation of every two channels over all samples and steps: (channel, channel).

    Values near 0 off the diagonal mean independent channels; values near ±1 mean redundant channels.
    The correlation of a constant channel is NaN.

    Parameters
    ----------
    x : Tensor or ndarray
        Outputs or gradients, such as (sample, time, channel).
    channel_axis : int
        The channel axis.

    Examples
    --------
    >>> channel_correlation([[0.0, 0.0], [1.0, -2.0], [2.0, -4.0]])
    tensor([[ 1.0000, -1.0000],
            [-1.0000,  1.0000]], dtype=torch.float64)
    """
    channels = _by_channel(x, channel_axis)
    if channels.shape[1] < 2:
        raise ConfigError(f"a correlation needs at least 2 values in each channel, got {channels.shape[1]}")
    centered = channels - channels[:, :1]  # this makes a constant channel exactly 0
    centered = centered - centered.mean(axis=1, keepdims=True)
    lengths = np.sqrt((centered * centered).sum(axis=1))
    lengths[lengths == 0] = np.nan
    unit = centered / lengths[:, None]
    return torch.from_numpy(np.clip(unit @ unit.T, -1, 1))


def _by_channel(x: Any, channel_axis: int) -> NDArray[np.float64]:
    values = to_array(x)
    if not -values.ndim <= channel_axis < values.ndim:
        raise ConfigError(f"channel_axis {channel_axis} does not exist in data of shape {values.shape}")
    moved = np.moveaxis(values, channel_axis, 0)
    return moved.reshape(moved.shape[0], -1)


@dataclass(frozen=True)
class Vanishing:
    """The decay of a gradient over time steps.

    Parameters
    ----------
    below : float
        Share of the steps whose largest magnitude is below the limit.
    zero : float
        Share of the steps that are exactly 0.
    norms : tuple of float
        (time,), the L2 norm of the gradient at each step.
    """

    below: float
    zero: float
    norms: tuple[float, ...]


def vanishing(gradients: Any, limit: float = 1e-8) -> Vanishing:
    """Return the share of time steps that a gradient does not reach.

    Parameters
    ----------
    gradients : Tensor or ndarray
        (sample, time, channel), (time, channel) or (time,).
    limit : float
        A step whose largest magnitude is below this limit counts as not reached.

    Examples
    --------
    >>> result = vanishing([0.5 ** (99 - t) for t in range(100)])
    >>> result.below, result.zero
    (0.73, 0.0)
    """
    values = to_array(gradients)
    if not 1 <= values.ndim <= 3 or not values.size:
        raise ConfigError(f"expected gradients (sample, time, channel), (time, channel) or (time,), got {values.shape}")
    steps = np.moveaxis(values, 1, 0) if values.ndim == 3 else values
    steps = steps.reshape(steps.shape[0], -1)
    largest = np.abs(steps).max(axis=1)
    norms = np.sqrt((steps * steps).sum(axis=1))
    return Vanishing(float((largest < limit).mean()), float((largest == 0).mean()), tuple(map(float, norms)))
