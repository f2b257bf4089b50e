"""Weights of recurrent layers, by gate and by name."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ikkuna.errors import ConfigError
from ikkuna.inspect.probe.capture import RNN_PARAMETERS, LayerId, find_layer
from ikkuna.inspect.probe.outputs import get_gradients
from ikkuna.support.modules import class_name, named_modules
from ikkuna.support.undisturbed import undisturbed

GATES = {"LSTM": ("input", "forget", "cell", "output"), "GRU": ("reset", "update", "new"), "RNN": ("hidden",)}
"""The gates of each kind of RNN, in the order in which PyTorch stacks their rows."""

_Recurrent = (nn.RNNBase, nn.RNNCellBase)


class Gate(NamedTuple):
    """The part of an RNN's weights that belongs to one gate."""

    kernel: Tensor
    recurrent: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class RNNWeights:
    """The weights of one layer and direction, transposed: rows are inputs, and the gates are side by side.

    Parameters
    ----------
    layer : int
        Number of the layer inside the RNN, from 0.
    direction : {'forward', 'backward'}
        Direction in which the layer reads the sequence.
    kind : {'LSTM', 'GRU', 'RNN'}
        Kind of the RNN.
    gates : tuple of str
        Names of the gates, from left to right.
    hidden : int
        Number of units :math:`H` of a gate.
    kernel : Tensor
        (input, gates * H).
    recurrent : Tensor
        (H, gates * H), or (projected, gates * H).
    bias : Tensor or None
        (2, gates * H), the biases of input and recurrence; ``None`` if there are none.  They are not added, because a
        GRU multiplies a part of the second one.
    projection : Tensor or None
        (H, projected); ``None`` if there is none.
    """

    layer: int
    direction: str
    kind: str
    gates: tuple[str, ...]
    hidden: int
    kernel: Tensor
    recurrent: Tensor
    bias: Tensor | None
    projection: Tensor | None

    def gate(self, name: str) -> Gate:
        """Return the columns of one gate: kernel (input, H), recurrent (H, H) and bias (2, H).

        Raises
        ------
        KeyError
            If this kind has no such gate; the message lists the gates.
        """
        if name not in self.gates:
            raise KeyError(f"{self.kind} has no gate {name!r}; available: {', '.join(self.gates)}")
        start = self.gates.index(name) * self.hidden
        columns = slice(start, start + self.hidden)
        bias = None if self.bias is None else self.bias[:, columns]
        return Gate(self.kernel[:, columns], self.recurrent[:, columns], bias)

    def panels(self) -> dict[str, Tensor]:
        """Return the existing matrices by name."""
        named = {"kernel": self.kernel, "recurrent": self.recurrent, "bias": self.bias, "projection": self.projection}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def __getitem__(self, index: int) -> Tensor | None:
        return (self.kernel, self.recurrent, self.bias)[index]

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.kernel, self.recurrent, self.bias))


def find_rnn(model: nn.Module, layer: LayerId | None = None) -> tuple[str, nn.Module]:
    """Return the name and the module of the RNN that `layer` refers to, by default the first one of the model.

    Raises
    ------
    KeyError
        If the layer does not exist.
    ConfigError
        If the layer is not an RNN, or if the model has none.
    """
    if layer is None:
        for name, module in named_modules(model):
            if isinstance(module, _Recurrent):
                return name, module
        raise ConfigError(f"{class_name(model)} has no recurrent layer (nn.RNN, nn.LSTM, nn.GRU or their cells)")
    name, module = _by_kind(model, layer) or find_layer(model, layer)
    for inner, candidate in named_modules(module):  # the layer may be a container of an RNN
        if isinstance(candidate, _Recurrent):
            return ".".join(part for part in (name, inner) if part), candidate
    raise ConfigError(f"{name!r} is not a recurrent layer but a {class_name(module)}")


def _by_kind(model: nn.Module, layer: LayerId) -> tuple[str, nn.Module] | None:
    """Return the first bidirectional RNN for a string such as ``'bidir'``, which is not a class name."""
    if not isinstance(layer, str) or not layer or not "bidirectional".startswith(layer.lower()):
        return None
    rnns = ((name, module) for name, module in named_modules(model) if isinstance(module, nn.RNNBase))
    return next(((name, module) for name, module in rnns if module.bidirectional), None)


def get_rnn_weights(
    rnn: nn.Module, layer: LayerId | None = None, *, mode: str = "weights", **loss: Any
) -> list[RNNWeights]:
    """Return the weights of an RNN, or their gradients, for each layer and direction.

    Parameters
    ----------
    rnn : nn.Module
        An ``nn.RNN``, ``nn.LSTM``, ``nn.GRU``, one of their cells, or a model that contains one.
    layer : int, str or nn.Module, optional
        Which RNN of the model; the first one by default.
    mode : {'weights', 'grads'}
        Return weights, or gradients of the loss defined by `x`, `y`, `loss_fn`, …  Without these, return the gradients
        stored in the model.
    **loss
        Arguments of :func:`~ikkuna.inspect.probe.outputs.get_gradients`.

    Returns
    -------
    list of RNNWeights
        Detached copies, layer by layer, forward before backward.

    Raises
    ------
    KeyError, ConfigError
        If the layer does not exist or is not an RNN, or if there are no gradients.

    Examples
    --------
    >>> (only,) = get_rnn_weights(nn.LSTM(4, 3))
    >>> tuple(only.kernel.shape), tuple(only.gate("forget").recurrent.shape)
    ((4, 12), (3, 3))
    """
    if mode not in ("weights", "grads"):
        raise ConfigError(f"mode must be 'weights' or 'grads', got {mode!r}")
    name, module = find_rnn(rnn, layer)
    if mode == "weights":
        with undisturbed(module):  # reading a parametrised weight can update buffers
            keys = (key for place in _layers_and_directions(module) for key in _keys(module, *place))
            tensors = {key: getattr(module, key) for key in keys}
    else:
        tensors = _gradients(rnn, module, name, loss)
    return [_one(module, tensors, k, reverse) for k, reverse in _layers_and_directions(module)]


def _gradients(model: nn.Module, rnn: nn.Module, name: str, loss: Mapping[str, Any]) -> dict[str, Tensor]:
    if hasattr(rnn, "parametrizations"):
        raise ConfigError(
            f"the weights of {name!r} are parametrised (computed from other tensors) and have no gradients"
        )
    if loss.get("x") is not None or loss.get("closure") is not None:
        found: dict[str, Tensor] = get_gradients(model, rnn, wrt="weights", **loss)
        return found
    stored = {key: p.grad for key, p in rnn.named_parameters() if p.grad is not None}
    if not stored:
        raise ConfigError(f"{name!r} has no gradients yet: call backward() before, or give x, y and loss_fn")
    return {key: stored.get(key, p.detach() * 0) for key, p in rnn.named_parameters()}


def _layers_and_directions(rnn: nn.Module) -> list[tuple[int, bool]]:
    if isinstance(rnn, nn.RNNCellBase):
        return [(0, False)]
    directions = (False, True) if rnn.bidirectional else (False,)
    return [(k, reverse) for k in range(int(rnn.num_layers)) for reverse in directions]  # type: ignore[arg-type]


def _suffix(rnn: nn.Module, layer: int, reverse: bool) -> str:
    if isinstance(rnn, nn.RNNCellBase):
        return ""
    return f"_l{layer}{'_reverse' if reverse else ''}"


def _keys(rnn: nn.Module, layer: int, reverse: bool) -> list[str]:
    keys = (kind + _suffix(rnn, layer, reverse) for kind in RNN_PARAMETERS)
    return [key for key in keys if getattr(rnn, key, None) is not None]


def _kind(rnn: nn.Module) -> str:
    kinds = {"LSTM": (nn.LSTM, nn.LSTMCell), "GRU": (nn.GRU, nn.GRUCell)}
    return next((kind for kind, classes in kinds.items() if isinstance(rnn, classes)), "RNN")


def _one(rnn: nn.Module, tensors: Mapping[str, Tensor], layer: int, reverse: bool) -> RNNWeights:
    suffix, kind = _suffix(rnn, layer, reverse), _kind(rnn)
    found = {key: tensors[key + suffix].detach().clone() for key in ("weight_ih", "weight_hh")}
    biases = [tensors[key + suffix].detach() for key in ("bias_ih", "bias_hh") if key + suffix in tensors]
    projection = tensors.get(f"weight_hr{suffix}")
    return RNNWeights(
        layer=layer,
        direction="backward" if reverse else "forward",
        kind=kind,
        gates=GATES[kind],
        hidden=found["weight_ih"].shape[0] // len(GATES[kind]),
        kernel=found["weight_ih"].T,
        recurrent=found["weight_hh"].T,
        bias=torch.stack(biases) if biases else None,
        projection=None if projection is None else projection.detach().clone().T,
    )


def rnn_summary(rnn: nn.Module, layer: LayerId | None = None) -> str:
    """Return the structure of an RNN as text: names and shapes for each layer and direction, and the rows of each gate.

    Examples
    --------
    >>> print(rnn_summary(nn.GRU(4, 3)))
    GRU: 1 layer, 3 hidden units, 81 parameters
      layer 0 forward
        weight_ih_l0  (9, 4)   rows: reset 0:3, update 3:6, new 6:9
        weight_hh_l0  (9, 3)
        bias_ih_l0    (9,)
        bias_hh_l0    (9,)
    """
    _, module = find_rnn(rnn, layer)
    positions, parts = _layers_and_directions(module), get_rnn_weights(module)
    first, count = parts[0], sum(p.numel() for p in module.parameters())
    layers = len({k for k, _ in positions})
    both = ", bidirectional" if any(reverse for _, reverse in positions) else ""
    head = f"{first.kind}: {layers} layer{'s' * (layers > 1)}{both}, {first.hidden} hidden units, {count} parameters"
    lines = [head]
    for (k, reverse), part in zip(positions, parts, strict=True):
        lines.append(f"  layer {k} {part.direction}")
        with undisturbed(module):
            lines += _rows(module, _keys(module, k, reverse), part)
    return "\n".join(lines)


def _rows(rnn: nn.Module, keys: list[str], part: RNNWeights) -> list[str]:
    shapes = [str(tuple(getattr(rnn, key).shape)) for key in keys]
    bounds = ((gate, i * part.hidden, (i + 1) * part.hidden) for i, gate in enumerate(part.gates))
    gates = "   rows: " + ", ".join(f"{gate} {a}:{b}" for gate, a, b in bounds)
    width = max(map(len, keys))
    lines = [f"    {key.ljust(width)}  {shape}" for key, shape in zip(keys, shapes, strict=True)]
    return [lines[0] + gates, *lines[1:]]
