"""What ``ikkuna.watch`` shows unless it is told otherwise."""

from ikkuna.export.preset import Preset
from ikkuna.export.subscriber import Subscriber
from ikkuna_subscribers.loss import LossSubscriber
from ikkuna_subscribers.norm import NormSubscriber
from ikkuna_subscribers.ratio import RatioSubscriber
from ikkuna_subscribers.train_accuracy import TrainAccuracySubscriber
from ikkuna_subscribers.variance import VarianceSubscriber

__all__ = ["DefaultPreset"]


class DefaultPreset(Preset):
    """Sizes of weights and gradients, spread of activations, update over weight, every tenth step; loss and accuracy in every step.

    Examples
    --------
    >>> [type(s).__name__ for s in DefaultPreset().subscribers(sees_loss=False)]
    ['NormSubscriber', 'NormSubscriber', 'VarianceSubscriber', 'RatioSubscriber']
    """

    def subscribers(self, sees_loss: bool) -> list[Subscriber]:
        """Return them; without the loss module neither loss nor accuracy can be seen."""
        of_modules: list[Subscriber] = [
            NormSubscriber("weights", subsample=10),
            NormSubscriber("layer_gradients", subsample=10),
            VarianceSubscriber("activations", subsample=10),
            RatioSubscriber(["weight_updates", "weights"], subsample=10),
        ]
        return [*of_modules, LossSubscriber(), TrainAccuracySubscriber()] if sees_loss else of_modules
