"""The norms of the gates of recurrent layers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.messages.kinds import PARAMETER_KINDS
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna_subscribers._helpers.recurrent_layers import RecurrentLayers

__all__ = ["GateSubscriber"]


class GateSubscriber(PlotSubscriber):
    r"""The L2 norm of each gate of recurrent layers, :math:`\sqrt{\sum_{i \in \mathrm{gate}} w_i^2}`.

    PyTorch stacks the rows of all gates in one matrix, whose norm does not distinguish them.
    An LSTM has the gates i, f, g and o (input, forget, cell, output), a GRU r, z and n (reset, update, new), an RNN only h.

    Takes kinds of parameters; publishes ``{kind}_gate_norm2``, in the unit of the parameter, with a series for each gate:
    ``lstm.weight_ih_l0.f``, for all layers, directions and cells and for both matrices.
    If a weight is computed from other parameters, by ``weight_norm`` or another parametrisation, those are measured gate by gate, as
    ``rnn.weight_hh_l0.original0.f``, because they are trained.  With ``weight_norm``, the norms of ``original0`` (``weight_hh_l0_g``)
    are those of the weight itself.
    A parameter with another number of rows publishes nothing, nor do projections and other modules.
    A gate with a NaN or Inf has norm NaN.

    Look for: gradients of one gate far below those of the others, which belong to a saturated gate that no longer learns;
    recurrent weights of f that shrink, which shortens the memory.

    Parameters
    ----------
    kinds : str or list of str
        Kinds of parameters; by default weights, their gradients and their updates.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If a kind is not one of parameters.

    Examples
    --------
    >>> GateSubscriber(["weights", "bias_gradients"]).publishes
    ('weights_gate_norm2', 'bias_gradients_gate_norm2')
    """

    needs_whole = True  # a part of the rows does not show where a gate begins

    def __init__(
        self, kinds: str | Sequence[str] = ("weights", "weight_gradients", "weight_updates"), **options: Any
    ) -> None:
        chosen = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        if wrong := [kind for kind in chosen if kind not in PARAMETER_KINDS]:
            known = ", ".join(PARAMETER_KINDS)
            raise ConfigError(f"GateSubscriber needs kinds of parameters ({known}), got {wrong[0]!r}")
        name_results(options, *(f"{kind}_gate_norm2" for kind in chosen))
        super().__init__(chosen, **options)
        self._layers = RecurrentLayers(lambda: self.network)

    def measure(self, message: Any) -> Tensor | None:
        """Return the sum of squares of each gate, in float64."""
        gates = self._layers.gates(message.module, message.path)
        x = message.data
        if not gates or not x.numel():
            return None
        squares = x.double().reshape(len(gates), -1).square().sum(1)
        return torch.where(torch.isfinite(squares), squares, math.nan)

    def unknown(self, message: Any) -> Tensor:
        """Return a row of NaN, one for each gate."""
        return torch.full((len(self._layers.gates(message.module, message.path)),), math.nan, device="cpu")

    def compute(self, message: ModuleMessage) -> None:
        """Emit the norm of each gate."""
        kind = self.publishes[self.kinds.index(message.kind)]
        for gate, square in zip(self._layers.gates(message.module, message.path), message.data, strict=True):
            part = replace(message, path=f"{message.path}.{gate}", name=f"{message.name}.{gate}")
            self.emit(part, math.sqrt(square), kind)
