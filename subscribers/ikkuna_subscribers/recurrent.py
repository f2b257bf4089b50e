"""The gates and the gradients at single timesteps of recurrent layers."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, Quantity, name_results
from ikkuna.metrics.messages.kinds import PARAMETER_KINDS
from ikkuna.numerics.elements import readable
from ikkuna.store.values import ModuleEntry

_PARAMETER = re.compile(
    r"(?P<part>(?:weight|bias)_(?:ih|hh))(?P<ending>(?:_l\d+)?(?:_reverse)?)(?:_[gv]|\.original\d+)?"
)
_GATES = {1: ("h",), 3: ("r", "z", "n"), 4: ("i", "f", "g", "o")}
_COUNT_OF_CLASS = {"RNN": 1, "GRU": 3, "LSTM": 4}


class RecurrentLayers:
    """Recognises recurrent layers by the names and shapes of their weights.

    This includes subclasses and layers of other libraries.

    The ``weight_hh`` ``(gates * H, H)`` of an LSTM has 4 gates (more rows per column if its outputs are projected), of a GRU 3,
    of an RNN 1.
    A parameter that such a weight is computed from, by ``weight_norm`` or another parametrisation, stacks the same gates
    if it has the same number of rows.  Its other axis has another meaning, so the class then gives the number of gates.

    Parameters
    ----------
    network : callable
        Returns the modules of the network; it is called again for a module that was not among them before.

    Examples
    --------
    >>> lstm = ModuleEntry("lstm", "LSTM", (("weight_ih_l0", (12, 2)), ("weight_hh_l0", (12, 3))))
    >>> layers = RecurrentLayers(lambda: [lstm])
    >>> layers.gates("lstm", "weight_ih_l0"), layers.gates("lstm", "weight_hr_l0"), layers.gates("fc", "")
    (('i', 'f', 'g', 'o'), (), ())
    """

    def __init__(self, network: Callable[[], Iterable[ModuleEntry]]) -> None:
        self._network = network
        self._gates: dict[str, dict[str, tuple[str, ...]]] = {}

    def gates(self, module: str, path: str) -> tuple[str, ...]:
        """Return the names of the gates whose rows a parameter stacks; empty for a parameter without gates."""
        return self._of(module).get(path, ())

    def is_recurrent(self, module: str) -> bool:
        """Return whether a module is a recurrent layer or cell."""
        return bool(self._of(module))

    def is_sequential(self, module: str) -> bool:
        """Return whether a module is a recurrent layer, which returns a sequence; a cell returns one timestep."""
        return any("_l0" in path for path in self._of(module))

    def _of(self, module: str) -> dict[str, tuple[str, ...]]:
        if module not in self._gates:
            self._gates = {entry.name: _gates_of(entry) for entry in self._network()}
        return self._gates.setdefault(module, {})


_Stacked = list[tuple[str, re.Match[str], tuple[int, ...]]]


def _gates_of(entry: ModuleEntry) -> dict[str, tuple[str, ...]]:
    """Return the gates that each parameter stacks, by its name."""
    stacked: _Stacked = [
        (path, found, shape) for path, shape in entry.parameters if shape and (found := _PARAMETER.fullmatch(path))
    ]
    rows = {found["ending"]: _rows(stacked, found["ending"]) for _, found, _ in stacked}
    gates = {ending: _GATES.get(_count(entry, stacked, ending), ()) for ending in rows}
    return {
        path: gates[found["ending"]]
        for path, found, shape in stacked
        if gates[found["ending"]] and shape[0] == rows[found["ending"]]
    }


def _rows(stacked: _Stacked, ending: str) -> int:
    """Return the number of rows of the parameters of one layer and direction.

    A parameter without parametrisation decides; if there is none, the largest number of rows.
    """
    of_this = [
        (path == found["part"] + ending, shape[0]) for path, found, shape in stacked if found["ending"] == ending
    ]
    return max(of_this)[1]


def _count(entry: ModuleEntry, stacked: _Stacked, ending: str) -> int:
    """Return the number of gates, 0 if it is unknown."""
    for path, _, shape in stacked:
        if path == f"weight_hh{ending}" and len(shape) == 2 and shape[1]:
            return min(shape[0] // shape[1], 4)
    return _COUNT_OF_CLASS.get(entry.class_name.removesuffix("Cell"), 0)


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

    quantity = Quantity(low=0.0, scale="log")
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


TIMESTEPS = (-1, -2, -4, -8, -16, -32, -64, -128)
"""The default timesteps: powers of 2 from the last one back."""

_SMALL = 0.01


class TimestepGradientSubscriber(PlotSubscriber):
    r"""The gradient with respect to the output of a layer at single timesteps, and the share of timesteps it reaches.

    For the timestep t it is :math:`g_t = \sqrt{\sum_{n, c} (\partial L / \partial y_{n t c})^2}` over samples and channels;
    the reach is the share of timesteps with :math:`g_t \ge \max_s g_s / 100`.

    Takes ``layer_gradients``; publishes ``layer_gradients_timestep_norm2``, in the unit of the gradient, with a series for each timestep
    (``lstm.t-1`` for the last one), and ``layer_gradients_timestep_reach``, between 0 and 1.
    Over several calls and micro-batches norms are those of all elements together, and the reach is the mean.
    It measures the first output of recurrent layers, or of the modules in ``modules=``, if it has a batch, timesteps and channels;
    the output of a recurrent layer may also have no batch.  A timestep that no sequence has publishes nothing.
    In a packed sequence, negative timesteps count from the end of each sequence, and so does the reach;
    packed sequences are measured only if the layer is not compiled.
    A gradient that is 0 everywhere has reach NaN; one with a NaN or Inf has NaN.

    Look for: whether the network learns long-term dependencies.  If ``t-64`` is orders of magnitude below ``t-1``, the network learns
    nothing from inputs 64 steps ago.  If the loss uses only the last output, its gradient exists at that one timestep:
    then measure the layer below (``modules="embedding"``), whose gradient has passed through time.

    Parameters
    ----------
    timesteps : sequence of int
        The timesteps, from 0 at the beginning or, if negative, from the end as in Python.
    batch_first : bool
        As for the layer: whether its output is (batch, time, channel) in place of (time, batch, channel).
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If `timesteps` is empty, has an element that is not an int, or has a timestep twice.

    Examples
    --------
    >>> TimestepGradientSubscriber(batch_first=True, subsample=10).publishes
    ('layer_gradients_timestep_norm2', 'layer_gradients_timestep_reach')
    """

    quantity = Quantity(low=0.0, scale="log")

    def __init__(self, timesteps: Sequence[int] = TIMESTEPS, *, batch_first: bool = False, **options: Any) -> None:
        if not timesteps or any(type(t) is not int for t in timesteps):
            raise ConfigError(f"TimestepGradientSubscriber needs timesteps such as (0, -1), got {timesteps!r}")
        if len(set(timesteps)) < len(timesteps):
            raise ConfigError(
                f"TimestepGradientSubscriber needs timesteps that differ from each other, got {timesteps!r}"
            )
        name_results(options, "layer_gradients_timestep_norm2", "layer_gradients_timestep_reach")
        super().__init__("layer_gradients", **options)
        self.timesteps = tuple(timesteps)
        self.batch_first = batch_first
        self._takes_any = options.get("modules") is not None
        self._layers = RecurrentLayers(lambda: self.network)

    def measure(self, message: Any) -> Tensor | None:
        """Return sums of squares by timestep, numbers of calls with that timestep, the sum of reaches and the number of calls."""
        is_wanted = self._takes_any or self._layers.is_recurrent(message.module)
        if not message.data.numel() or message.path or not is_wanted:
            return None
        if (squares := self._squares(message)) is None:
            return None
        forward, backward = (torch.where(torch.isfinite(s), s, math.nan) for s in squares)
        length = len(forward)
        there = [-length <= t < length for t in self.timesteps]
        picked = [
            (forward if t >= 0 else backward)[t] if has else torch.zeros_like(forward[0])
            for t, has in zip(self.timesteps, there, strict=True)
        ]
        reach = (backward >= backward.max() * _SMALL**2).double().mean()
        reach = torch.where(backward.max() > 0, reach, math.nan)
        one, none = torch.ones_like(reach), torch.zeros_like(reach)  # created on the device of the data, without a copy
        return torch.stack([*picked, *(one if has else none for has in there), reach, one])

    def _squares(self, message: Any) -> tuple[Tensor, Tensor] | None:
        """Return sums of squares by timestep, ``(T,)``, once counted from the start of each sequence and once from its end."""
        x = message.data
        if (read := readable(x)) is None:
            return None
        sizes = getattr(x, "batch_sizes", None)
        squares = read[0].double().square()
        if sizes is not None:
            rows = squares.flatten(1).sum(1)
            forward, backward = (at.to(rows.device, non_blocking=True) for at in _timesteps_of_rows(sizes))
            none = rows.new_zeros(len(sizes))
            return none.index_add(0, forward, rows), none.index_add(0, backward, rows)
        if x.ndim == 3:
            summed = squares.sum((0, 2) if self.batch_first else (1, 2))
        elif x.ndim == 2 and self._layers.is_sequential(message.module):
            summed = squares.sum(1)
        else:
            return None
        return summed, summed

    def compute(self, message: ModuleMessage) -> None:
        """Emit the norms and the reach."""
        norm, reach = self.publishes
        squares, counts = message.data[:-2].reshape(2, -1)
        total, calls = message.data[-2:]
        for timestep, square, count in zip(self.timesteps, squares, counts, strict=True):
            if count:
                part = replace(message, path=f"t{timestep}", name=f"{message.name}.t{timestep}")
                self.emit(part, math.sqrt(square), norm)
        self.emit(message, total / calls, reach)


def _timesteps_of_rows(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the timestep of each row of a packed sequence, counted from the start and aligned at the end.

    Parameters
    ----------
    sizes : Tensor
        ``(T,)``, the number of sequences at each timestep, the longest sequences first.

    Examples
    --------
    >>> forward, backward = _timesteps_of_rows(torch.tensor([2, 1, 1]))     # lengths 3 and 1
    >>> forward.tolist(), backward.tolist()
    ([0, 0, 1, 2], [0, 2, 1, 2])
    """
    forward = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), sizes)
    sequence = torch.arange(len(forward), device="cpu") - torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    lengths = (sizes > torch.arange(int(sizes[0]), device="cpu").unsqueeze(1)).sum(1)
    return forward, forward + len(sizes) - lengths[sequence]
