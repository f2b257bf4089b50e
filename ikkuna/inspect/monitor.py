"""Statistics of a model's parameters and gradients as one flat dictionary for a logger.

Keys are ``{model}/{layer}/{param}/{attr}/{statistic}``; the layer is ``*`` for the whole model.
Every call returns the same keys, with NaN for missing values, so that every entry of a log has the same columns.

>>> import torch
>>> layer = torch.nn.Linear(3, 1)
>>> _ = layer.weight.data.copy_(torch.tensor([[10.0, 20.0, 30.0]]))
>>> weight_statistics(layer)["Linear/*/weight/data/percentile/3"]
20.0
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ikkuna.errors import ConfigError
from ikkuna.inspect.netdict.description import record_of
from ikkuna.numerics.elements import dense
from ikkuna.numerics.statistics.histogram import SIGMA, percentiles
from ikkuna.support.modules import class_name, is_bias, name_of, named_modules, owned_parameters
from ikkuna.support.torch_internals import RUNNING_NORMS

__all__ = [
    "SIGMA",
    "bias_gradient_statistics",
    "bias_statistics",
    "parameter_statistics",
    "sparsity",
    "weight_gradient_statistics",
    "weight_statistics",
]


_NORMS = (
    RUNNING_NORMS,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    *((nn.RMSNorm,) if hasattr(nn, "RMSNorm") else ()),
)
_NAMES = {"weight": "weight", "bias": "bias", "all": "all"}


def weight_statistics(model: nn.Module, layer: str | nn.Module | None = None, **options: Any) -> dict[str, float]:
    """Return :func:`parameter_statistics` of the weights."""
    return parameter_statistics(model, "weight", "data", layer, **options)


def bias_statistics(model: nn.Module, layer: str | nn.Module | None = None, **options: Any) -> dict[str, float]:
    """Return :func:`parameter_statistics` of the biases."""
    return parameter_statistics(model, "bias", "data", layer, **options)


def weight_gradient_statistics(
    model: nn.Module, layer: str | nn.Module | None = None, **options: Any
) -> dict[str, float]:
    """Return :func:`parameter_statistics` of the gradients of the weights."""
    return parameter_statistics(model, "weight", "grad", layer, **options)


def bias_gradient_statistics(
    model: nn.Module, layer: str | nn.Module | None = None, **options: Any
) -> dict[str, float]:
    """Return :func:`parameter_statistics` of the gradients of the biases."""
    return parameter_statistics(model, "bias", "grad", layer, **options)


def parameter_statistics(
    model: nn.Module,
    param: str = "weight",
    attr: str = "data",
    layer: str | nn.Module | None = None,
    *,
    layer_name: str | nn.Module | None = None,
    percentiles: Sequence[float] = SIGMA,
    correction: int = 0,
    nan: str = "propagate",
    include_norm: bool = False,
    name: str | None = None,
    param_names: Mapping[str, str] = _NAMES,
) -> dict[str, float]:
    r"""Return minimum, maximum, mean, standard deviation and percentiles over all elements of the selected parameters.

    Parameters
    ----------
    model : nn.Module
        The model.  Wrappers are skipped, and shared parameters count once.
    param : {'weight', 'bias', 'all'}
        Which parameters, by their names (see :func:`~ikkuna.support.modules.is_bias`).
    attr : {'data', 'grad'}
        Values or gradients.
    layer, layer_name : str or nn.Module, optional
        One layer and all modules inside it.  ``None`` selects the whole model without normalisation layers.
    percentiles : sequence of float
        By default those that correspond to the mean and to 1, 2 and 3 standard deviations of a normal distribution.
    correction : int
        The variance is :math:`M_2 / (n - \mathrm{correction})`.
    nan : {'propagate', 'omit'}
        If there are NaN or infinite elements, return NaN for every statistic, or leave these elements out.
    include_norm : bool
        Include the weights and biases of normalisation layers.
    name : str, optional
        Name of the model in the keys; its class name by default.
    param_names : mapping of str to str
        Names of ``weight`` and ``bias`` in the keys, such as ``{'weight': 'W', 'bias': 'b'}``.

    Returns
    -------
    dict of str to float
        ``min``, ``max``, ``mean``, ``std`` and ``percentile/{i}``.  All are NaN for a selection without elements: there
        is no such parameter, it is lazy, or it has no gradient.

    Raises
    ------
    KeyError
        If there is no such layer; the message names similar layers.
    ConfigError
        If `param`, `attr` or `nan` has another value.

    Examples
    --------
    >>> layer = torch.nn.Linear(3, 1)
    >>> _ = layer.weight.data.copy_(torch.tensor([[10.0, 20.0, 30.0]]))
    >>> parameter_statistics(layer, percentiles=[50])
    {'Linear/*/weight/data/min': 10.0, 'Linear/*/weight/data/max': 30.0, 'Linear/*/weight/data/mean': 20.0,
     'Linear/*/weight/data/std': 8.16496580927726, 'Linear/*/weight/data/percentile/0': 20.0}
    """
    _check("param", param, ("weight", "bias", "all"))
    _check("attr", attr, ("data", "grad"))
    _check("nan", nan, ("propagate", "omit"))
    layer = layer if layer is not None else layer_name
    tensors = [_content(p, attr) for p in _select(model, param, layer, include_norm)]
    present = [tensor for tensor in tensors if tensor is not None]
    prefix = f"{name or class_name(model)}/{_label(model, layer)}/{param_names.get(param, param)}/{attr}"
    return {f"{prefix}/{key}": value for key, value in _statistics(present, percentiles, correction, nan).items()}


def sparsity(
    model: nn.Module,
    include_bias: bool = False,
    layer: str | nn.Module | None = None,
    *,
    layer_name: str | nn.Module | None = None,
    tol: float = 0.0,
    include_norm: bool = False,
    name: str | None = None,
    param_names: Mapping[str, str] = _NAMES,
) -> dict[str, float]:
    """Return the number of zero weights (and biases): ``zeros``, the ``total`` number and the ``fraction``.

    An element counts if its magnitude is at most `tol`; -0.0 counts, NaN does not.  The fraction of no elements is NaN.

    Parameters
    ----------
    model : nn.Module
        The model.  Wrappers are skipped, and shared parameters count once.
    include_bias : bool
        Count all parameters instead of the weights only.
    layer, layer_name, include_norm, name, param_names : Any
        As for :func:`parameter_statistics`.
    tol : float
        Largest magnitude that counts as zero.

    Examples
    --------
    >>> layer = torch.nn.Linear(2, 1, bias=False)
    >>> _ = layer.weight.data.copy_(torch.tensor([[0.0, 5.0]]))
    >>> sparsity(layer)
    {'Linear/*/weight/sparsity/zeros': 1, 'Linear/*/weight/sparsity/fraction': 0.5, 'Linear/*/weight/sparsity/total': 2}
    """
    layer = layer if layer is not None else layer_name
    chosen = _select(model, "all" if include_bias else "weight", layer, include_norm)
    tensors = [p.detach() for p in chosen if not is_lazy(p)]
    zeros = sum(int(torch.count_nonzero(t.abs() <= tol)) for t in tensors)
    total = sum(t.numel() for t in tensors)
    what = param_names.get("weight", "weight") + (param_names.get("bias", "bias") if include_bias else "")
    prefix = f"{name or class_name(model)}/{_label(model, layer)}/{what}/sparsity"
    fraction = zeros / total if total else math.nan
    return {f"{prefix}/zeros": zeros, f"{prefix}/fraction": fraction, f"{prefix}/total": total}


def _check(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _content(parameter: Tensor, attr: str) -> Tensor | None:
    if is_lazy(parameter):
        return None
    content = parameter if attr == "data" else parameter.grad
    return None if content is None else content.detach()


def _select(model: nn.Module, param: str, layer: str | nn.Module | None, include_norm: bool) -> Iterator[nn.Parameter]:
    root = model if layer is None else _find(model, layer)[1]
    seen: set[int] = set()
    for _, module in named_modules(root):
        if layer is None and not include_norm and isinstance(module, _NORMS):
            continue
        for name, parameter in owned_parameters(module):
            if id(parameter) not in seen and _is_selected(name, param):
                seen.add(id(parameter))
                yield parameter


def _is_selected(name: str, param: str) -> bool:
    return param == "all" or (is_bias(name) if param == "bias" else "weight" in name and not is_bias(name))


def _find(model: nn.Module, layer: str | nn.Module) -> tuple[str, nn.Module]:
    modules = dict(named_modules(model))
    if isinstance(layer, nn.Module):
        layer = name_of(model, layer)
    if layer not in modules:
        close = difflib.get_close_matches(layer, modules, n=5, cutoff=0.3) or [key for key in modules if key][:10]
        raise KeyError(f"no layer {layer!r} in {class_name(model)}; close: {', '.join(close)}")
    return layer, modules[layer]


def _label(model: nn.Module, layer: str | nn.Module | None) -> str:
    return "*" if layer is None else _find(model, layer)[0]


def _statistics(tensors: list[Tensor], q: Sequence[float], correction: int, nan: str) -> dict[str, float]:
    if nan == "omit":
        tensors = [x[torch.isfinite(x)] for x in map(dense, tensors)]
    record = record_of(tensors, ("m2", "min", "max"))
    broken = not record.n or record.nonfinite > 0
    low, high = (record.min, record.max) if not broken else (math.nan, math.nan)
    std = math.sqrt(record.variance(correction))
    values = {"min": low, "max": high, "mean": record.mean, "std": std}
    cuts = [math.nan] * len(q) if broken else percentiles(tensors, q)
    return {**values, **{f"percentile/{i}": cut for i, cut in enumerate(cuts)}}  # type: ignore[dict-item]
