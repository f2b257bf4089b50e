"""A subscriber whose values are meant to be looked at."""

from ikkuna.export.subscriber.base import Subscriber

__all__ = ["PlotSubscriber"]


class PlotSubscriber(Subscriber):
    """A subscriber with a picture: ``title`` and ``ylims`` say how its curves should look.

    Backends that draw axes honour both; TensorBoard shows the title and chooses limits itself.
    """
