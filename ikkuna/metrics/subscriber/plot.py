"""The base class of metrics with a chart."""

from ikkuna.metrics.subscriber.base import Subscriber

__all__ = ["PlotSubscriber"]


class PlotSubscriber(Subscriber):
    """A subscriber whose values are drawn with ``title`` and ``ylims``.

    Backends that draw axes use both; TensorBoard shows the title and chooses the limits itself.
    """
