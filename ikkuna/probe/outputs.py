"""Outputs of layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.errors import ConfigError
from ikkuna.modules import class_name
from ikkuna.probe.capture import Call, capture
from ikkuna.probe.isolation import isolated, without_replica_wrappers
from ikkuna.probe.layers import LayerId, find_layers
from ikkuna.probe.loss import run_model

__all__ = ["checked_calls", "choose_part", "get_outputs", "pad_value", "sequence_summary", "shape_result"]


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
    """Return detached copies of the outputs of `layers` for the input `x`.

    Parameters
    ----------
    model : nn.Module
        The model.  Its state is restored, also after an exception.
    layers : int, str, nn.Module or sequence of them
        See :func:`~ikkuna.probe.layers.find_layer`; ``'*'`` means every leaf that is called.
    x : Tensor, ndarray, list, PackedSequence, tuple or dict
        The input.  A tuple is passed as several arguments, a dictionary as named arguments.
    train : bool
        Run the model in training mode.
    as_dict : bool
        Return a dictionary by layer name.
    part : {'auto', 'output', 'h_n', 'c_n'}
        Which output of an RNN; ``'auto'`` is the sequence.
    rnn_layer : int, optional
        Which layer inside an RNN with several layers; the last one by default.
    pad : {0, 'nan'}
        The value after the end of a packed sequence.

    Returns
    -------
    Tensor, list or dict of Tensor
        For a list of layers, a list in the same order.  The output of an RNN has the shape ``(sample, time, channel)``
        for every layout of its input, the outputs of an RNN cell have it over its calls, and a state has ``(sample,
        channel)``. For other modules, the output of the last call.

    Raises
    ------
    KeyError
        If a layer does not exist.
    ConfigError
        If a layer was not called, or has no such part.

    Examples
    --------
    >>> rnn = nn.RNN(1, 1, nonlinearity="relu", bias=False, batch_first=True)
    >>> for weight, value in zip(rnn.parameters(), (1.0, 0.5)):
    ...     _ = nn.init.constant_(weight, value)
    >>> get_outputs(rnn, "rnn", torch.ones(1, 3, 1)).flatten()
    tensor([1.0000, 1.5000, 1.7500])
    """
    model = without_replica_wrappers(model)
    chosen = find_layers(model, layers)
    with isolated(model, train), torch.no_grad(), capture([m for _, m in chosen], "outputs", rnn_layer) as calls:
        run_model(model, x)
    results = {}
    for name, module in chosen:
        if not calls[module] and layers == "*":
            continue
        value = _collect(checked_calls(calls[module], name), part, pad)
        results[name] = value.detach().clone()
    return shape_result(results, layers, as_dict)


def checked_calls(calls: list[Call], name: str) -> list[Call]:
    """Return `calls`, or raise `ConfigError` if the layer was not called."""
    if not calls:
        raise ConfigError(f"the layer {name!r} was not called while the model ran")
    return calls


def _collect(calls: list[Call], part: str, pad: Any) -> Tensor:
    if isinstance(calls[-1].module, nn.RNNCellBase):
        return torch.stack([call.arrange("output", choose_part(call, part)[1], 0.0) for call in calls], 1)
    name, value = choose_part(calls[-1], part)
    return calls[-1].arrange(name, value, pad_value(pad))


def choose_part(call: Call, part: str) -> tuple[str, Tensor]:
    """Return the name and the tensor of a part of a call.

    Raises
    ------
    ConfigError
        If there is no such part.
    """
    name = "output" if part == "auto" else part
    name = {"h_n": "output", "c_n": "1"}.get(name, name) if isinstance(call.module, nn.RNNCellBase) else name
    if name not in call.parts:
        known = ", ".join(call.parts) or "no tensors"
        raise ConfigError(f"{class_name(call.module)} has no part {part!r}; available: {known}")
    return name, call.parts[name]


def pad_value(pad: Any) -> float:
    """Return `pad`, which must be 0 or ``'nan'``, as a float."""
    if pad not in (0, "nan"):
        raise ConfigError(f"pad must be 0 or 'nan', got {pad!r}")
    return float(pad)


def shape_result(results: dict[str, Any], layers: Any, as_dict: bool) -> Any:
    """Return one result for a single layer, a list for several layers, or a dictionary by name."""
    if as_dict:
        return results
    values = list(results.values())
    single = isinstance(layers, int | nn.Module) or (isinstance(layers, str) and layers != "*")
    return values[0] if single else values


def sequence_summary(rnn: nn.RNNBase, output: Any) -> Tensor:
    """Return the state of the last layer after it has read the whole sequence: ``(sample, directions * channel)``.

    For a bidirectional RNN this differs from ``out[:, -1]``, because the backward direction ends at the first step.

    Parameters
    ----------
    rnn : nn.RNNBase
        The RNN.
    output : tuple
        The output of the RNN.
    """
    state = output[1][0] if isinstance(rnn, nn.LSTM) else output[1]
    return Call(rnn, {}).arrange("h_n", state, 0.0)
