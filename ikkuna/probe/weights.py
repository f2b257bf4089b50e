"""Copies of the weights of layers, their norms over time, and the loss terms of weight decay."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ikkuna.errors import ConfigError
from ikkuna.modules import named_modules, named_parameters
from ikkuna.numerics.float64 import as_float64
from ikkuna.probe.layers import LayerId, find_layer, find_layers, leaves
from ikkuna.probe.outputs import shape_result
from ikkuna.undisturbed import undisturbed

__all__ = ["Penalty", "effective", "get_weights", "weight_penalties", "weights_norm"]

_STATS: Mapping[str, Callable[[Tensor], Tensor]] = {"max": torch.max, "mean": torch.mean}
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def get_weights(model: nn.Module, layers: LayerId | Sequence[LayerId], *, as_dict: bool = False) -> Any:
    """Return copies of the parameters of `layers` by name; a parametrised tensor is returned as the layer uses it.

    Parameters
    ----------
    model : nn.Module
        The model; wrappers are skipped.
    layers : int, str, nn.Module or sequence of them
        See :func:`~ikkuna.probe.layers.find_layer`.  A string such as ``'gru/weight_hh_l0'`` selects one parameter by
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
        See :func:`~ikkuna.probe.layers.find_layer`.
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
    :math:`(\lambda/2) \sum w^2`.  The weight decay of AdamW is decoupled from the loss.

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


def _decays(optimizer: torch.optim.Optimizer) -> dict[int, tuple[float, bool]]:
    decays = {}
    for group in optimizer.param_groups:
        decoupled = group.get("decoupled_weight_decay", False) or "AdamW" in type(optimizer).__name__
        for parameter in group["params"]:
            decays[id(parameter)] = (float(group.get("weight_decay", 0.0)), bool(decoupled))
    return decays
