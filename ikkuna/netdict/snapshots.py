"""Snapshots of a model's weights, gradients and optimizer state; every snapshot is a copy."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ikkuna.errors import ConfigError
from ikkuna.modules import named_parameters
from ikkuna.netdict.description import Description
from ikkuna.netdict.net_dict import NetDict

__all__ = ["compute_stats", "get_adam_update", "get_grad", "get_optimizer_state", "get_update", "get_weight"]


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
        For a parameter without gradient, return nothing, zeros or NaN.
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
        elif missing != "skip":
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

    Parameters without this state are left out.  The optimizer is not changed.

    Raises
    ------
    KeyError
        If no parameter has this state; the message lists the existing states.
    """
    states = {name: optimizer.state.get(p, {}) for name, p in _parameters(model)}  # indexing would add an entry
    found = {name: state[key] for name, state in states.items() if state.get(key) is not None}
    if not found:
        raise KeyError(_no_state(key, states, type(optimizer).__name__))
    return NetDict(found, device=_target_device(cpu, device), dtype=dtype)


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

    `options` are those of :meth:`~ikkuna.netdict.net_dict.NetDict.describe`.  Without gradients, their description is
    empty.

    Raises
    ------
    KeyError
        If the optimizer does not have a state.
    """
    keys = [keys] if isinstance(keys, str) else keys
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
