"""The outputs of layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.errors import ConfigError
from ikkuna.modules import class_name, unwrap
from ikkuna.probe.capture import Call, capture
from ikkuna.probe.isolation import isolated
from ikkuna.probe.layers import LayerId, find_layers
from ikkuna.probe.loss import run_model

__all__ = ["called", "choose", "get_outputs", "pad_value", "sequence_summary", "shape_result"]


def get_outputs(
    model: nn.Module,
    layers: LayerId | Sequence[LayerId],
    x: Any,
    *,
    train: bool = False,
    as_dict: bool = False,
    part: str = "auto",
    rnn_layer: int | None = None,
    pad: Any = 0,
) -> Any:
    """Return what `layers` give out when the model sees `x`, as detached copies.

    Parameters
    ----------
    model : nn.Module
        Left as it was found, also after an exception.
    layers : int, str, nn.Module or sequence of them
        See :func:`~ikkuna.probe.layers.find_layer`; ``'*'`` means every leaf that is called.
    x : Tensor, array, list, PackedSequence, tuple or dict
        The input; a tuple stands for several arguments, a dictionary for named ones.
    train : bool
        Run the model in training mode.
    as_dict : bool
        Return a dictionary by layer name.
    part : {'auto', 'output', 'h_n', 'c_n'}
        Which output of an RNN; ``'auto'`` is the sequence.
    rnn_layer : int, optional
        Which layer inside an RNN of several; the last by default.
    pad : 0 or 'nan'
        What stands beyond the end of a packed sequence.

    Returns
    -------
    Tensor, list or dict of Tensor
        A list if a list was asked for, in its order.  From an RNN ``(sample, time, channel)``, whatever its layout,
        from an RNN cell the same over its calls; a state is ``(sample, channel)``.
        From other modules, what they returned at their last call.

    Raises
    ------
    KeyError
        For an unknown layer.
    ConfigError
        For a layer that was not called, or has no such part.

    Examples
    --------
    >>> rnn = nn.RNN(1, 1, nonlinearity="relu", bias=False, batch_first=True)
    >>> for weight, value in zip(rnn.parameters(), (1.0, 0.5)):
    ...     _ = nn.init.constant_(weight, value)
    >>> get_outputs(rnn, "rnn", torch.ones(1, 3, 1)).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    model = unwrap(model)
    chosen = find_layers(model, layers)
    with isolated(model, train), torch.no_grad(), capture([m for _, m in chosen], "outputs", rnn_layer) as calls:
        run_model(model, x)
    results = {}
    for name, module in chosen:
        if not calls[module] and layers == "*":
            continue
        value = _collect(called(calls[module], name), part, pad)
        results[name] = value.detach().clone()
    return shape_result(results, layers, as_dict)


def called(calls: list[Call], name: str) -> list[Call]:
    """Return `calls`, or raise `ConfigError` if there are none."""
    if not calls:
        raise ConfigError(f"the layer {name!r} was not called while the model ran")
    return calls


def _collect(calls: list[Call], part: str, pad: Any) -> Tensor:
    if isinstance(calls[-1].module, nn.RNNCellBase):
        return torch.stack([call.arrange("output", choose(call, part)[1], 0.0) for call in calls], 1)
    name, value = choose(calls[-1], part)
    return calls[-1].arrange(name, value, pad_value(pad))


def choose(call: Call, part: str) -> tuple[str, Tensor]:
    """Return the name and tensor of a part of a call.

    Raises
    ------
    ConfigError
        If there is no such part.
    """
    name = "output" if part == "auto" else part
    name = {"h_n": "output", "c_n": "1"}.get(name, name) if isinstance(call.module, nn.RNNCellBase) else name
    if name not in call.parts:
        known = ", ".join(call.parts) or "no tensors"
        raise ConfigError(f"{class_name(call.module)} has no part {part!r}; there are: {known}")
    return name, call.parts[name]


def pad_value(pad: Any) -> float:
    """Return the number `pad` means, 0 or ``'nan'``."""
    if pad not in (0, "nan"):
        raise ConfigError(f"pad must be 0 or 'nan', got {pad!r}")
    return float(pad)


def shape_result(results: dict[str, Any], layers: Any, as_dict: bool) -> Any:
    """Return one result for one layer, a list for several, or all by name."""
    if as_dict:
        return results
    values = list(results.values())
    single = isinstance(layers, int | nn.Module) or (isinstance(layers, str) and layers != "*")
    return values[0] if single else values


def sequence_summary(rnn: nn.RNNBase, output: Any) -> Tensor:
    """Return the state ``(sample, directions * channel)`` of the last layer after it has read the whole sequence.

    For a bidirectional RNN this is not ``out[:, -1]``: its backward half ends at the first step.

    Parameters
    ----------
    rnn : nn.RNNBase
    output : tuple
        What it returned.
    """
    state = output[1][0] if isinstance(rnn, nn.LSTM) else output[1]
    return Call(rnn, {}).arrange("h_n", state, 0.0)
