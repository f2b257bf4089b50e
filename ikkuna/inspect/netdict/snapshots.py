"""Snapshots of a model's weights, gradients and optimizer state, and figures computed from them."""

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ikkuna.errors import ConfigError
from ikkuna.inspect.netdict.description import Description
from ikkuna.inspect.netdict.net_dict import NetDict, Pattern
from ikkuna.numerics.elements import as_float64, as_reals, has_fractions
from ikkuna.numerics.noise import NoiseScale, fit_noise_scale, noise_scale
from ikkuna.support.modules import named_parameters


def trust_ratio(
    w_prev: Mapping[str, Any],
    w_new: Mapping[str, Any],
    lr: float = 1.0,
    numerator: str = "new",
    eps: float = 0.0,
    pattern: Pattern = None,
    layerwise: bool = True,
) -> Any:
    r"""Return :math:`\mathrm{lr} \cdot \|W_t\|_2 / (\|W_t - W_{t-1}\|_2 + \varepsilon)`.

    After You, Gitman & Ginsburg, *Large Batch Training of Convolutional Networks* (2017).

    Parameters
    ----------
    w_prev, w_new : mapping of str to Tensor
        The weights before and after the step.
    lr : float
        The learning rate, for the ratio to the update before it was scaled.
    numerator : {'new', 'old'}
        Which weights are the numerator.
    eps : float
        The constant :math:`\varepsilon`.
    pattern : str or list of str, optional
        Use only the tensors whose name matches.
    layerwise : bool
        Return a ratio for each tensor, as a NetDict; otherwise one for the whole net.

    Returns
    -------
    NetDict or float
        NaN if the weights did not change.

    Raises
    ------
    ConfigError
        If the names differ, or if `numerator` has another value.

    Examples
    --------
    >>> trust_ratio({"w": [3.0, 3.0]}, {"w": [3.0, 4.0]})
    NetDict(w=5.0)
    """
    if numerator not in ("new", "old"):
        raise ConfigError(f"numerator must be 'new' or 'old', got {numerator!r}")
    old, new = NetDict(w_prev, copy=False).select(pattern), NetDict(w_new, copy=False).select(pattern)
    update, above = new - old, new if numerator == "new" else old
    if not layerwise:
        return _ratio(above.norm(2), update.norm(2), lr, eps)
    lengths = above.norm(2, layerwise=True)
    steps = update.norm(2, layerwise=True)
    return NetDict({name: _ratio(lengths[name], steps[name], lr, eps) for name in steps}, copy=False)


def compute_trust_ratio(w0: Mapping[str, Any], w1: Mapping[str, Any], lr: float = 1.0, **options: Any) -> Any:
    """Return :func:`trust_ratio` of the step from `w0` to `w1`."""
    return trust_ratio(w0, w1, lr, **options)


def _ratio(above: float, below: float, lr: float, eps: float) -> float:
    return lr * above / (below + eps) if below + eps > 0 else math.nan


def get_weight(
    model: nn.Module,
    requires_grad: bool = False,
    cpu: bool = True,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> NetDict:
    """Return a copy of every parameter by name.

    A shared parameter appears once, a lazy one only after it has been initialised.

    Parameters
    ----------
    model : nn.Module
        The model; wrappers do not appear in the names.
    requires_grad : bool
        Return only trained parameters.
    cpu : bool
        Store the copies in host memory; otherwise on the device of each parameter.
    device : str or torch.device, optional
        Store the copies on this device instead; ``'same'`` means the device of each parameter.
    dtype : torch.dtype, optional
        Data type of the copies; unchanged by default.

    Examples
    --------
    >>> layer = nn.Linear(2, 1)
    >>> before = get_weight(layer)
    >>> with torch.no_grad():
    ...     _ = layer.weight.add_(1)
    >>> (get_weight(layer) - before).norm(2, layerwise=True)["bias"]
    0.0
    """
    values = {name: p for name, p in _parameters(model) if p.requires_grad or not requires_grad}
    return NetDict(values, device=_target_device(cpu, device), dtype=dtype)


def get_grad(
    model: nn.Module,
    missing: str = "skip",
    cpu: bool = True,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> NetDict:
    """Return a copy of every parameter's gradient by name.

    Parameters
    ----------
    model : nn.Module
        The model; wrappers do not appear in the names.
    missing : {'skip', 'zeros', 'nan'}
        For a parameter without gradient, return nothing, zeros or NaN.  Integers, which cannot have one, are left out.
    cpu, device, dtype : bool, str or torch.device, torch.dtype
        As for :func:`get_weight`.

    Raises
    ------
    ConfigError
        If `missing` has another value.
    """
    if missing not in ("skip", "zeros", "nan"):
        raise ConfigError(f"missing must be 'skip', 'zeros' or 'nan', got {missing!r}")
    values = {}
    for name, parameter in _parameters(model):
        if parameter.grad is not None:
            values[name] = parameter.grad
        elif missing != "skip" and has_fractions(parameter):
            values[name] = torch.full_like(parameter, 0.0 if missing == "zeros" else torch.nan)
    return NetDict(values, device=_target_device(cpu, device), dtype=dtype)


def get_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    key: str = "exp_avg",
    cpu: bool = True,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> NetDict:
    """Return a copy of one state of the optimizer, by the name of the parameter that it belongs to.

    Parameters without this state are left out, and so is a state with more elements than its parameter: LBFGS
    stores what belongs to all parameters with the first one.  The optimizer is not changed.

    Raises
    ------
    KeyError
        If no parameter has this state; the message lists the existing states.
    """
    states = {  # indexing would add an entry
        name: {word: value for word, value in optimizer.state.get(p, {}).items() if _belongs_to(p, value)}
        for name, p in _parameters(model)
    }
    found = {name: state[key] for name, state in states.items() if state.get(key) is not None}
    if not found:
        raise KeyError(_no_state(key, states, type(optimizer).__name__))
    return NetDict(found, device=_target_device(cpu, device), dtype=dtype)


def _belongs_to(parameter: Tensor, value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() <= max(1, parameter.numel())


def _no_state(key: str, states: Mapping[str, Mapping[str, Any]], optimizer: str) -> str:
    known = sorted({word for state in states.values() for word in state})
    if not known:
        return f"no state {key!r}: this {optimizer} has no state for the model, as before its first step()"
    close = difflib.get_close_matches(key, known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ";"
    return f"no state {key!r} in this {optimizer}{hint} available: {', '.join(known)}"


def get_update(before: Mapping[str, Any], after: Mapping[str, Any], lr: float = 1.0) -> NetDict:
    """Return ``(after - before) / lr``."""
    return (_net(after) - before) / lr


def get_adam_update(exp_avg: Mapping[str, Any], exp_avg_sq: Mapping[str, Any], eps: float = 1e-8) -> NetDict:
    r"""Return :math:`m / (\sqrt v + \varepsilon)`, the direction of Adam's step without bias correction."""
    return _net(exp_avg) / (_net(exp_avg_sq).sqrt() + eps)


def compute_stats(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    keys: str | Iterable[str] = (),
    display: bool = False,
    **options: Any,
) -> dict[str, Description]:
    """Return descriptions of weights, gradients and optimizer states, under ``weight``, ``grad`` and each of `keys`.

    `options` are those of :meth:`~ikkuna.inspect.netdict.net_dict.NetDict.describe`.  Without gradients, their description is
    empty.

    Raises
    ------
    KeyError
        If the optimizer does not have a state.
    ConfigError
        If there are keys and no optimizer.
    """
    keys = [keys] if isinstance(keys, str) else list(keys)
    if keys and optimizer is None:
        raise ConfigError(f"compute_stats() needs an optimizer for its state {keys[0]!r}")
    nets = {"weight": get_weight(model, device="same"), "grad": get_grad(model, device="same")}
    if optimizer is not None:
        nets |= {key: get_optimizer_state(model, optimizer, key, device="same") for key in keys}
    return {name: net.describe(display=display, **options) for name, net in nets.items()}


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in named_parameters(model) if not is_lazy(p))


def _target_device(cpu: bool, device: str | torch.device | None) -> str | torch.device:
    if device is not None:
        return device
    return "cpu" if cpu else "same"


def _net(values: Mapping[str, Any]) -> NetDict:
    return values if isinstance(values, NetDict) else NetDict(values, copy=False)


def two_batch_noise_scale(small: float, small_sq: float, big: float, big_sq: float) -> NoiseScale:
    r"""Return the noise scale from mean squared gradient norms at two batch sizes.

    This is :func:`~ikkuna.numerics.noise.noise_scale` with a check of the batch sizes.

    Raises
    ------
    ConfigError
        Unless ``0 < small < big``.

    Examples
    --------
    >>> two_batch_noise_scale(10, 14.0, 50, 6.0).noise_scale
    25.0
    """
    if not 0 < small < big:
        raise ConfigError(f"the batch sizes must be positive, the second larger than the first; got {small} and {big}")
    return noise_scale(small_sq, big_sq, small, big)


def compute_noise_scale(
    model: nn.Module,
    closure: Callable[[], Tensor],
    micro_batch_size: int,
    num_iters: int = 100,
    num_average: int = 1,
    *,
    method: str = "two_batch",
    reduction: str = "mean",
) -> NoiseScale:
    """Estimate the noise scale from the gradients of `num_iters` micro-batches.

    The gradients stored in the model do not change.

    Parameters
    ----------
    model : nn.Module
        The model.
    closure : callable
        Returns the loss of a new micro-batch, without calling ``backward``.  It is called
        ``num_iters * num_average`` times.
    micro_batch_size : int
        The number of samples in a micro-batch.
    num_iters : int
        The number of micro-batches in one round.
    num_average : int
        The number of rounds to average.  More rounds make negative estimates rarer.
    method : {'two_batch', 'curve'}
        ``'two_batch'`` compares the mean squared norm of the micro-batches with the squared norm of their mean.
        ``'curve'`` fits a line through the squared norms of the mean of the first 1, 2, … micro-batches, weighted by
        their number.
    reduction : {'mean', 'sum'}
        Whether the loss is the mean or the sum over the samples.

    Raises
    ------
    ConfigError
        If there are fewer than two iterations, if `method` or `reduction` is unknown, or if the loss does not depend
        on the model.
    """
    if num_iters < 2 or num_average < 1 or micro_batch_size < 1:
        raise ConfigError(
            "the noise scale needs num_iters >= 2, num_average >= 1 and micro_batch_size >= 1, "
            f"got {num_iters}, {num_average} and {micro_batch_size}"
        )
    if method not in ("two_batch", "curve") or reduction not in ("mean", "sum"):
        raise ConfigError(
            f"method must be 'two_batch' or 'curve' and reduction 'mean' or 'sum', got {method!r} and {reduction!r}"
        )
    parameters = [p for p in model.parameters() if p.requires_grad]
    scale = 1.0 if reduction == "mean" else 1.0 / micro_batch_size
    micro, nested = [0.0] * num_iters, [0.0] * num_iters
    for _ in range(num_average):
        for i, (small, big) in enumerate(_squared_norms(closure, parameters, num_iters, scale)):
            micro[i] += small / num_average
            nested[i] += big / num_average
    sizes = [micro_batch_size * (i + 1) for i in range(num_iters)]
    if method == "curve":
        return fit_noise_scale(sizes, nested, sizes)
    return two_batch_noise_scale(sizes[0], math.fsum(micro) / num_iters, sizes[-1], nested[-1])


def _squared_norms(
    closure: Callable[[], Tensor], parameters: list[nn.Parameter], num_iters: int, scale: float
) -> Iterable[tuple[float, float]]:
    """Yield the squared norm of the gradient of each micro-batch, and of the mean gradient of all so far."""
    total = [as_float64(torch.zeros_like(as_reals(p))) for p in parameters]
    for i in range(num_iters):
        gradients = _gradients(closure(), parameters)
        small = 0.0
        for accumulated, gradient in zip(total, gradients, strict=True):
            if gradient is not None:
                exact = as_float64(as_reals(gradient)) * scale
                accumulated += exact
                small += float((exact * exact).sum())
        yield small, math.fsum(float((t * t).sum()) for t in total) / (i + 1) ** 2


def _gradients(loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ConfigError("the closure must return the loss of a micro-batch, as a tensor that depends on the model")
    return torch.autograd.grad(loss, parameters, allow_unused=True)


def noise_scale_table(results: Iterable[tuple[str, str, float | NoiseScale]]) -> str:
    """Return (model, dataset, noise scale) triples as a markdown table.

    Examples
    --------
    >>> print(noise_scale_table([("GPT-2 baby", "OpenWebText", 25.0)]))
    | Model      | Dataset     | Noise Scale |
    | ---------- | ----------- | ----------- |
    | GPT-2 baby | OpenWebText | 25          |
    """
    rows = [("Model", "Dataset", "Noise Scale"), *((m, d, _number(scale)) for m, d, scale in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    rows.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2]))
    cells = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _number(scale: float | NoiseScale) -> str:
    value = scale.noise_scale if isinstance(scale, NoiseScale) else scale
    return "" if math.isnan(value) else f"{value:.4g}"
