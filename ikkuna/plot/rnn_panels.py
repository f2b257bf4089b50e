"""The matrices of an RNN for each layer and direction, as arrays for figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ikkuna.arrays import to_array
from ikkuna.errors import ConfigError
from ikkuna.plot.figure import NanCount, count_nonfinite
from ikkuna.probe.rnn_weights import GATES, RNNWeights, get_rnn_weights

__all__ = ["RNNPanels", "rnn_panels"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RNNPanels:
    """The matrices of one layer and direction.

    Parameters
    ----------
    name : str
        Such as ``'LAYER 0 FORWARD'``, or ``'FORWARD LAYER'`` for an RNN with one layer.
    gates : tuple of str
        Names of the gates, from left to right.
    panels : mapping of str to ndarray
        ``kernel``, ``recurrent`` and, if they exist, ``bias`` and ``projection``.
    """

    name: str
    gates: tuple[str, ...]
    panels: Mapping[str, Array]

    def gate(self, panel: str, index: int) -> Array:
        """Return the columns of one gate."""
        hidden = self.panels[panel].shape[1] // len(self.gates)
        return self.panels[panel][:, index * hidden : (index + 1) * hidden]

    @property
    def separators(self) -> list[float]:
        """Positions between the gates, in columns."""
        hidden = self.panels["kernel"].shape[1] // len(self.gates)
        return [hidden * k - 0.5 for k in range(1, len(self.gates))]

    def nan_counts(self) -> dict[str, NanCount | None]:
        """Return the counts of NaN and infinite elements, by gate for kernel and recurrent."""
        gated = ((panel, i, gate) for panel in ("kernel", "recurrent") for i, gate in enumerate(self.gates))
        counts = {f"{panel}/{gate}": count_nonfinite(self.gate(panel, i)) for panel, i, gate in gated}
        return counts | {
            panel: count_nonfinite(self.panels[panel]) for panel in ("bias", "projection") if panel in self.panels
        }


def rnn_panels(
    rnn: nn.Module | None,
    layer: Any = None,
    *,
    mode: str = "weights",
    data: Any = None,
    rnn_layers: Any = "all",
    bias: bool = True,
    absolute: bool = False,
    normalize: bool = False,
    **loss: Any,
) -> list[RNNPanels]:
    """Return the matrices to draw, for each layer and direction.

    Parameters
    ----------
    rnn : nn.Module or None
        An RNN, a cell, or a model that contains one.
    layer : int, str or nn.Module, optional
        See :func:`~ikkuna.probe.rnn_weights.get_rnn_weights`.
    mode : {'weights', 'grads'}
        See :func:`~ikkuna.probe.rnn_weights.get_rnn_weights`.
    data : sequence, optional
        Matrices to draw instead of those of the RNN: kernel, recurrent and bias for each direction, or
        :class:`~ikkuna.probe.rnn_weights.RNNWeights`.
    rnn_layers : 'all', int or sequence of int
        Layers of an RNN with several layers.
    bias : bool
        Include the biases.
    absolute : bool
        Return magnitudes.
    normalize : bool
        Scale each matrix to 0 … 1; a constant matrix becomes 0.
    **loss
        See :func:`~ikkuna.probe.rnn_weights.get_rnn_weights`.
    """
    parts = _from_data(rnn, layer, data) if data is not None else get_rnn_weights(_model(rnn), layer, mode=mode, **loss)
    layers = sorted({part.layer for part in parts})
    chosen = layers if rnn_layers == "all" else [rnn_layers] if isinstance(rnn_layers, int) else list(rnn_layers)
    if unknown := [k for k in chosen if k not in layers]:
        raise ConfigError(f"rnn_layers contains {unknown[0]}; available: {layers}")
    result = []
    for part in (part for part in parts if part.layer in chosen):
        arrays = {name: to_array(tensor) for name, tensor in part.panels().items() if bias or name != "bias"}
        arrays = {name: _scaled(array, absolute, normalize) for name, array in arrays.items()}
        direction = part.direction.upper()
        name = f"LAYER {part.layer} {direction}" if len(layers) > 1 else f"{direction} LAYER"
        result.append(RNNPanels(name, part.gates, arrays))
    return result


def _model(rnn: nn.Module | None) -> nn.Module:
    if not isinstance(rnn, nn.Module):
        raise ConfigError(f"expected a model or an RNN, got {type(rnn).__name__}")
    return rnn


def _from_data(rnn: nn.Module | None, layer: Any, data: Any) -> Sequence[RNNWeights]:
    if all(isinstance(each, RNNWeights) for each in data):
        return list(data)
    step = 3 if len(data) % 3 == 0 else 2
    if len(data) % step:
        raise ConfigError(f"data must hold kernel, recurrent (and bias) for each direction, got {len(data)} entries")
    kind = get_rnn_weights(rnn, layer)[0].kind if rnn is not None else _kind(data)
    groups = [data[i : i + step] for i in range(0, len(data), step)]
    return [_weights(kind, group, i) for i, group in enumerate(groups)]


def _kind(data: Any) -> str:
    """Return the kind of the RNN from the shape of the recurrent matrix."""
    rows, columns = np.shape(to_array(data[1]))
    kinds = {len(gates): kind for kind, gates in GATES.items()}
    if columns % rows or columns // rows not in kinds:
        raise ConfigError(f"a recurrent matrix must have shape (hidden, gates * hidden), got ({rows}, {columns})")
    return kinds[columns // rows]


def _weights(kind: str, group: Sequence[Any], index: int) -> RNNWeights:
    import torch

    tensors = [None if each is None else torch.from_numpy(to_array(each)) for each in group]
    kernel, recurrent, bias = (*tensors, None)[:3]
    if kernel is None or recurrent is None:
        raise ConfigError("data needs a kernel and a recurrent matrix for each direction")
    bias = bias if bias is None or bias.ndim == 2 else bias[None]
    hidden = kernel.shape[1] // len(GATES[kind])
    direction = ("forward", "backward")[index % 2]
    return RNNWeights(index // 2, direction, kind, GATES[kind], hidden, kernel, recurrent, bias, None)


def _scaled(array: Array, absolute: bool, normalize: bool) -> Array:
    array = np.abs(array) if absolute else array
    if not normalize:
        return array
    finite = array[np.isfinite(array)]
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 0.0)
    return (array - low) / (high - low) if high > low else np.where(np.isfinite(array), 0.0, array)
