"""The presets of ``ikkuna.watch``."""

from types import MappingProxyType
from typing import Any

from ikkuna.export.subscriber import Subscriber
from ikkuna.metrics.subscriber.bases import Preset
from ikkuna_subscribers.activations import DeadUnitsSubscriber
from ikkuna_subscribers.distribution import HistogramSubscriber, PercentileSubscriber
from ikkuna_subscribers.gradients import ClippingSubscriber
from ikkuna_subscribers.moments import (
    GlobalNormSubscriber,
    MeanSubscriber,
    NormSubscriber,
    SparsitySubscriber,
    VarianceSubscriber,
)
from ikkuna_subscribers.non_finite import NonFiniteSubscriber
from ikkuna_subscribers.predictions import LossSubscriber, PredictionSubscriber, TrainAccuracySubscriber
from ikkuna_subscribers.spectrum import SpectralNormSubscriber
from ikkuna_subscribers.training import LearningRateSubscriber, SpeedSubscriber
from ikkuna_subscribers.updates import CosineSubscriber, DistanceFromInitSubscriber, RatioSubscriber

_RECTIFIERS = ("ReLU", "ReLU6")
_UPDATE = ["weight_updates", "weights"]


def _of_validation(sees_loss: bool, **options: Any) -> list[Subscriber]:
    """Return the metrics of evaluations in the training loop; each of these is sampled."""
    options["tag"] = "validation"
    accuracy = [TrainAccuracySubscriber(publishes="accuracy", **options)] if sees_loss else []
    return [LossSubscriber(**options), *accuracy]


class EconomyPreset(Preset):
    """The fewest metrics that show whether a training goes wrong, every hundredth step; the loss every tenth step.

    Loss and accuracy, also of evaluations in the training loop, learning rate, global norm of the gradients, ratio of update to weight,
    variance of the activations, and speed.
    Rules sample modules every hundredth step too, and the loss every tenth step.

    Examples
    --------
    >>> {s.subscription.subsample for s in EconomyPreset().subscribers(sees_loss=True)}
    {10, 100}
    """

    rules = MappingProxyType({"every": 100, "loss_every": 10})

    def subscribers(self, sees_loss: bool) -> list[Subscriber]:
        """Return the subscribers; without labels there is no accuracy."""
        return [
            LossSubscriber(subsample=10),
            *([TrainAccuracySubscriber(subsample=100)] if sees_loss else ()),
            *_of_validation(sees_loss, subsample=100),
            LearningRateSubscriber(subsample=100),
            GlobalNormSubscriber(subsample=100),
            RatioSubscriber(_UPDATE, subsample=100),
            VarianceSubscriber("activations", subsample=100),
            SpeedSubscriber(subsample=100),
        ]


class DefaultPreset(Preset):
    """Metrics that show where and when a training goes wrong, every tenth step.

    Loss and accuracy, also of evaluations in the training loop, learning rate, global norm of the gradients before and after clipping,
    ratio of update to weight, norms of weights and layer gradients, variance of the activations, dead units of rectified layers every
    twentieth step, the operation that made the first NaN every fiftieth step, and speed.
    The accuracy is left out if the labels are unknown, and dead units if no module is a ``ReLU`` or ``ReLU6``.

    Examples
    --------
    >>> [type(s).__name__ for s in DefaultPreset().subscribers(sees_loss=False)][2:4]
    ['LearningRateSubscriber', 'GlobalNormSubscriber']
    """

    def subscribers(self, sees_loss: bool) -> list[Subscriber]:
        """Return the subscribers."""
        return [
            LossSubscriber(subsample=10),
            *([TrainAccuracySubscriber(subsample=10)] if sees_loss else ()),
            *_of_validation(sees_loss, subsample=10),
            LearningRateSubscriber(subsample=10),
            GlobalNormSubscriber(subsample=10),
            ClippingSubscriber(subsample=10),
            RatioSubscriber(_UPDATE, subsample=10),
            NormSubscriber("weights", subsample=10),
            NormSubscriber("layer_gradients", subsample=10),
            VarianceSubscriber("activations", subsample=10),
            *self._dead_units(),
            NonFiniteSubscriber(subsample=50),
            SpeedSubscriber(subsample=10),
        ]

    def _dead_units(self) -> list[Subscriber]:
        """Return the metric of dead units as the rule about them needs it, so that nothing is measured twice."""
        names = [entry.name for entry in self.network if entry.class_name in _RECTIFIERS]
        if not names:
            return []
        return [DeadUnitsSubscriber(modules=names, window=3, inactivity=0, tau=None, subsample=20)]


class FullPreset(DefaultPreset):
    """The default preset, and distributions, shapes and predictions, for a search after a mistake.

    Every tenth step: mean, zeros and percentiles of the activations, norms of the weight gradients, and statistics of the predictions.
    Every hundredth step: histograms of weights, weight gradients and activations, spectral norm of the weights,
    distance from the initial weights, and the cosine of successive weight gradients.
    The last two keep a copy of all weights each.

    Examples
    --------
    >>> FullPreset().subscribers(sees_loss=False)[-1].publishes
    ('weight_gradients_cosine',)
    """

    def subscribers(self, sees_loss: bool) -> list[Subscriber]:
        """Return the subscribers."""
        return [
            *super().subscribers(sees_loss),
            *([PredictionSubscriber(subsample=10)] if sees_loss else ()),
            NormSubscriber("weight_gradients", subsample=10),
            MeanSubscriber("activations", subsample=10),
            SparsitySubscriber("activations", subsample=10),
            PercentileSubscriber("activations", subsample=10),
            *(HistogramSubscriber(kind, subsample=100) for kind in ("weights", "weight_gradients", "activations")),
            SpectralNormSubscriber(subsample=100),
            DistanceFromInitSubscriber(subsample=100),
            CosineSubscriber("weight_gradients", subsample=100),
        ]
