"""Units of a layer that do nothing any more."""

from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import ModuleMessage, Stamp
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.activation import dead_share, dormant_share, unit_counters

__all__ = ["DeadUnitsSubscriber"]


class DeadUnitsSubscriber(PlotSubscriber):
    r"""The share of a layer's units that never fire, and of those that fire far less than their neighbours.

    A unit is a channel: the last axis of a tensor with up to three axes, the second of one with more.
    Over a window of steps it is *dead* if :math:`\#(h > 0)` is less than a share `inactivity` of its positions, and *dormant* if
    :math:`E|h_c| / \operatorname{mean}_k E|h_k| \le \tau`.  The first is meant for rectified layers; the second suits every function.

    Takes any kind with a tensor; choose the layers with `modules`.
    Publishes ``{kind}_dead`` and ``{kind}_dormant``, between 0 and 1, from the first step on, of up to `window` samples.
    Elements that are not finite are left out; a unit without a finite element is not counted, and without any the value is NaN.
    A tensor without axes publishes nothing, and of several calls in a step only those with as many units as the first one count.
    For each layer it keeps ``3 * window`` float64 numbers per unit, on the host.

    Look for: above one half the layer is sick, and dead units do not come back; a jump follows a step that was too large.

    Parameters
    ----------
    kind : str
        What to look at.
    window : int
        Number of samples a unit has to show itself in.
    inactivity : float
        Share of positions, in [0, 1], below which a unit counts as dead; with 0 only one that never fires.
    tau : float
        Score at which a unit counts as dormant.
    channel_axis : int, optional
        The axis of units, where it is another.
    **options
        See `Subscriber`.

    Raises
    ------
    ConfigError
        For a number out of range.

    References
    ----------
    G. Sokar et al., The dormant neuron phenomenon in deep reinforcement learning, 2023.

    Examples
    --------
    >>> DeadUnitsSubscriber(modules="*relu*").publishes
    ('activations_dead', 'activations_dormant')
    """

    def __init__(
        self,
        kind: str = "activations",
        *,
        window: int = 10,
        inactivity: float = 0.01,
        tau: float = 0.025,
        channel_axis: int | None = None,
        **options: Any,
    ) -> None:
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ConfigError(f"DeadUnitsSubscriber needs a window >= 1, got {window!r}")
        if not 0 <= inactivity <= 1 or not tau >= 0:
            raise ConfigError(
                f"DeadUnitsSubscriber needs an inactivity in [0, 1] and tau >= 0, got {inactivity!r} and {tau!r}"
            )
        name_results(options, f"{kind}_dead", f"{kind}_dormant")
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
        counters = unit_counters(message.data, axis)
        stamp, units = self._units.get(message.series_name, (None, 0))
        if not counters.numel() or (stamp == message.stamp and units != counters.shape[1]):
            return None  # counters of other units do not add to what the step has
        self._units[message.series_name] = message.stamp, counters.shape[1]
        return counters

    def compute(self, message: ModuleMessage) -> None:
        """Emit both shares."""
        window = self._windows.setdefault(message.series_name, deque(maxlen=self.window))
        if window and window[-1].shape != message.data.shape:
            window.clear()
        window.append(message.data.copy())
        counters = torch.from_numpy(np.sum(window, axis=0))
        self.emit(message, dead_share(counters, self.inactivity).item(), self.publishes[0])
        self.emit(message, dormant_share(counters, self.tau).item(), self.publishes[1])
