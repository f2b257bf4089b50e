"""The distance between the running statistics of batch norm and those of the batch."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from ikkuna.export.messages import ModuleMessage
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.running_statistics import running_statistics_distance

__all__ = ["RunningStatisticsSubscriber"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class RunningStatisticsSubscriber(PlotSubscriber):
    r"""How far the running mean and variance of a batch norm are from those of the batch.

    Evaluation uses the running statistics, so a distance means that the network computes something else there than in training.
    See `ikkuna.numerics.running_statistics.running_statistics_distance`; at most 4,096 positions of each channel are read.
    A layer in evaluation mode, one without running statistics, and a batch with fewer than 8 samples publish nothing.

    Takes ``layer_inputs`` of batch-norm layers; publishes ``running_mean_distance``, in running standard deviations,
    and ``running_variance_distance``, the magnitude of a logarithm.  Several calls and micro-batches are averaged.

    Look for: distances that stay large after the first hundred steps: the momentum is too small,
    or other data, such as unnormalised images, pass through the layer in training mode.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> RunningStatisticsSubscriber().publishes
    ('running_mean_distance', 'running_variance_distance')
    """

    needs_model = True

    def __init__(self, **options: Any) -> None:
        name_results(options, "running_mean_distance", "running_variance_distance")
        super().__init__("layer_inputs", **options)
        self._layers: dict[str, nn.Module] | None = None

    def _layer(self, name: str) -> nn.Module | None:
        if self._layers is None:
            self._layers = {n.name: n.module for n in self.modules if isinstance(n.module, _BATCH_NORMS)}
        return self._layers.get(name)

    def measure(self, message: ModuleMessage) -> Tensor | None:
        """Return the number of calls, and the sums of both squared distances."""
        layer = self._layer(message.module)
        if layer is None or not layer.training or message.path:
            return None
        buffers = layer._buffers
        mean, variance = buffers.get("running_mean"), buffers.get("running_var")
        x = message.data
        if mean is None or variance is None or x.ndim < 2 or len(x) < 8 or x.shape[1] != len(mean):
            return None
        return torch.cat([mean.new_ones(1), running_statistics_distance(x, mean, variance)]).double()

    def compute(self, message: ModuleMessage) -> None:
        """Emit both distances."""
        calls, *sums = message.data
        for kind, total in zip(self.publishes, sums, strict=True):
            self.emit(message, math.sqrt(total / calls) if total >= 0 else math.nan, kind)
