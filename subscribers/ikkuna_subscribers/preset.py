"""The default metrics of ``ikkuna.watch``."""

from ikkuna.export.preset import Preset
from ikkuna.export.subscriber import Subscriber
from ikkuna_subscribers.loss import LossSubscriber
from ikkuna_subscribers.norm import NormSubscriber
from ikkuna_subscribers.ratio import RatioSubscriber
from ikkuna_subscribers.train_accuracy import TrainAccuracySubscriber
from ikkuna_subscribers.variance import VarianceSubscriber

__all__ = ["DefaultPreset"]


class DefaultPreset(Preset):
    """Norms of weights and gradients, variance of activations and update ratios every tenth step; loss and accuracy always.

    The accuracy is left out if the labels are unknown.

    Examples
    --------
    >>> [type(s).__name__ for s in DefaultPreset().subscribers(sees_loss=False)]
    ['NormSubscriber', 'NormSubscriber', 'VarianceSubscriber', 'RatioSubscriber', 'LossSubscriber']
    """

    def subscribers(self, sees_loss: bool) -> list[Subscriber]:
        """Return the subscribers; without labels there is no accuracy."""
        always: list[Subscriber] = [
            NormSubscriber("weights", subsample=10),
            NormSubscriber("layer_gradients", subsample=10),
            VarianceSubscriber("activations", subsample=10),
            RatioSubscriber(["weight_updates", "weights"], subsample=10),
            LossSubscriber(),
        ]
        return [*always, TrainAccuracySubscriber()] if sees_loss else always
