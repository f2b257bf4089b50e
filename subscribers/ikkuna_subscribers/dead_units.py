"""The share of units of a layer that are inactive."""

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage, Stamp
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.activation import active_units, dead_share, dormant_share, unit_counters
from ikkuna_subscribers._helpers.arguments import require_integers

__all__ = ["DeadUnitsSubscriber"]


class DeadUnitsSubscriber(PlotSubscriber):
    r"""The share of a layer's units that are never active, and of those that are far less active than the other units.

    A unit is a channel: the last axis of a tensor with up to three axes, the second axis of one with more.
    Over a window of steps it is *dead* if :math:`\#(h > 0)` is less than a share `inactivity` of its positions, and *dormant* if
    :math:`E|h_c| / \operatorname{mean}_k E|h_k| \le \tau`.  The first is for rectified layers; the second suits every activation function.

    Takes any kind with a tensor; choose the layers with `modules`.
    Publishes ``{kind}_dead`` and ``{kind}_dormant``, between 0 and 1, from the first step on, over at most `window` samples.
    Elements that are not finite are left out; units without a finite element are left out, and without any unit the value is NaN.
    A tensor without axes publishes nothing.  Of several calls in a step, those with another number of units than the first are left out.
    For each layer it keeps ``3 * window`` float64 numbers per unit, on the host.
    With ``inactivity=0, tau=None`` only the largest element of each unit is read, in a single pass over at most 8192 positions of a unit;
    a unit with a NaN then counts as active.

    Look for: above one half the layer is broken, and dead units do not recover; a jump follows a step that was too large.

    Parameters
    ----------
    kind : str
        The kind to measure.
    window : int
        The number of samples over which activity is counted.
    inactivity : float
        The share of positions, in [0, 1], below which a unit is dead; with 0 only a unit that is never active.
    tau : float, optional
        The score at or below which a unit is dormant; with ``None`` only ``{kind}_dead`` is published.
    channel_axis : int, optional
        The axis of units, if it is another one.
    **options : Any
        See `Subscriber`.

    Raises
    ------
    ConfigError
        If a number is out of range.

    References
    ----------
    G. Sokar et al., The dormant neuron phenomenon in deep reinforcement learning, 2023.

    Examples
    --------
    >>> DeadUnitsSubscriber(modules="*relu*").publishes
    ('activations_dead', 'activations_dormant')
    """

    state = ("_windows",)

    def __init__(
        self,
        kind: str = "activations",
        *,
        window: int = 10,
        inactivity: float = 0.01,
        tau: float | None = 0.025,
        channel_axis: int | None = None,
        **options: Any,
    ) -> None:
        require_integers("DeadUnitsSubscriber", window=window)
        if not 0 <= inactivity <= 1 or not (tau is None or tau >= 0):
            raise ConfigError(
                f"DeadUnitsSubscriber needs an inactivity in [0, 1] and tau >= 0, got {inactivity!r} and {tau!r}"
            )
        name_results(options, f"{kind}_dead", *([] if tau is None else [f"{kind}_dormant"]))
        super().__init__(kind, **options)
        self.window = window
        self.inactivity = inactivity
        self.tau = tau
        self.channel_axis = channel_axis
        self._units: dict[str | None, tuple[Stamp, int]] = {}
        self._windows: dict[str | None, deque[NDArray[np.float64]]] = {}

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the counters of every unit."""
        axis = self.channel_axis
        if axis is not None and not -message.data.ndim <= axis < message.data.ndim:
            return None
        counters = self._counters(message.data, axis)
        stamp, units = self._units.get(message.series_name, (None, 0))
        if not counters.numel() or (stamp == message.stamp and units != counters.shape[1]):
            return None  # counters of another number of units cannot be added to those of this step
        self._units[message.series_name] = message.stamp, counters.shape[1]
        return counters

    def _counters(self, activations: Tensor, axis: int | None) -> Tensor:
        return active_units(activations, axis).unsqueeze(0) if self._is_fast else unit_counters(activations, axis)

    @property
    def _is_fast(self) -> bool:
        return self.tau is None and self.inactivity == 0

    def compute(self, message: ModuleMessage) -> None:
        """Emit the shares."""
        window = self._windows.setdefault(message.series_name, deque(maxlen=self.window))
        if window and window[-1].shape != message.data.shape:
            window.clear()
        window.append(message.data.copy())
        if self._is_fast:
            dead = np.logical_not(window).all(axis=(0, 1)) if len(window) > 1 else window[0][0] == 0
            self.emit(message, float(dead.mean()), self.publishes[0])
            return
        counters = torch.from_numpy(np.sum(window, axis=0))
        self.emit(message, dead_share(counters, self.inactivity).item(), self.publishes[0])
        if self.tau is not None:
            self.emit(message, dormant_share(counters, self.tau).item(), self.publishes[1])
