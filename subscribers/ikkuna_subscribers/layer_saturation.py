"""The share of the width of a layer that its outputs use."""

import math
from typing import Any

from torch import Tensor

from ikkuna.errors import ConfigError
from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import name_results
from ikkuna.numerics.representation.cka import to_rows
from ikkuna.numerics.representation.layer_saturation import Scatter, intrinsic_dimension
from ikkuna_subscribers._helpers.probe_subscriber import ProbeSubscriber

__all__ = ["LayerSaturationSubscriber"]


class LayerSaturationSubscriber(ProbeSubscriber):
    """The share of a layer's directions that hold most of the variance of its outputs, :math:`k / d`.

    k is the smallest number of eigenvalues of the outputs' covariance ``(d, d)`` that hold a share `threshold` of their sum.
    The channels of a convolution are its directions, its positions are rows; the time steps of a sequence are rows as well.
    The covariance is summed over the batches of a fixed probe set, in float64, in evaluation mode.
    `SaturationSubscriber` measures something else: the flat ends of activation functions.

    Takes ``epoch_finished`` or ``batch_finished``; publishes ``layer_saturation`` between 0 and 1, and ``intrinsic_dimension``, that is k.
    Both are NaN for outputs that are constant or not finite.  For n rows, k is at most n - 1; the log warns if n is below d + 1.
    An evaluation costs :math:`2 n d^2` operations, an eigendecomposition and two times :math:`8 d^2` bytes for each layer.

    Look for: low saturation of layers at the end of a network, which is unused capacity;
    saturation above one half in all layers, which means that the network is too narrow.

    Parameters
    ----------
    dataset : torch.utils.data.Dataset or Tensor
        Inputs, or pairs (input, label); see `ProbeSubscriber`.
    threshold : float
        The share of the variance, in (0, 1].
    compat : {None, 'delve'}
        ``'delve'`` counts directions as that library does; see `ikkuna.numerics.representation.layer_saturation`.
    **options : Any
        ``samples``, ``batch_size``, ``every``, ``forward`` as for `ProbeSubscriber`, and those of `Subscriber`.

    Raises
    ------
    ConfigError
        If an argument is out of range, the probe set is empty, or the model cannot be run over it.

    References
    ----------
    M. Richter et al., Feature space saturation during training, 2021.

    Examples
    --------
    >>> import torch
    >>> from ikkuna.testing import run
    >>> values = run(LayerSaturationSubscriber(torch.eye(4).repeat(2, 1), every=1), steps=1)
    >>> {(v.kind, v.name): v.value for v in values}["intrinsic_dimension", "first"]
    3.0
    """

    def __init__(self, dataset: Any, *, threshold: float = 0.99, compat: str | None = None, **options: Any) -> None:
        if not 0 < threshold <= 1 or compat not in (None, "delve"):
            raise ConfigError(
                f"LayerSaturationSubscriber needs a threshold in (0, 1] and compat None or 'delve', "
                f"got {threshold!r}, {compat!r}"
            )
        name_results(options, "layer_saturation", "intrinsic_dimension")
        super().__init__(dataset, **options)
        self.threshold = threshold
        self.compat = compat

    def evaluate_and_emit(self, message: NetworkMessage | None) -> None:
        """Sum the covariances and emit the values."""
        scatters: dict[str, Scatter] = {}

        def add(batch: dict[str, Tensor]) -> None:
            for name, output in batch.items():
                part = Scatter.of(to_rows(output))
                scatters[name] = scatters[name] + part if name in scatters else part

        self.collect_outputs(add)
        if message is None:
            return

        def dimensions() -> dict[str, float]:
            return {
                name: intrinsic_dimension(scatter.covariance(), self.threshold, self.compat)
                for name, scatter in scatters.items()
            }

        def emit(message: NetworkMessage, found: dict[str, float]) -> None:
            for name, dimension in found.items():
                n, width = scatters[name].n, len(scatters[name].mean)
                if n <= width:
                    self.warn_once(name, f"{n} rows of {width} features have at most {n - 1} directions")
                share, reason = dimension / width if width else math.nan, "its outputs are constant or not finite"
                self.emit_module(message, name, share, self.publishes[0], reason=reason)
                self.emit_module(message, name, dimension, self.publishes[1])

        self.conclude(message, dimensions, emit)
