"""Figures of outputs and labels that show mistakes of a training loop."""

import math
from typing import Any

from torch import Tensor

from ikkuna.export.messages import MessageBundle
from ikkuna.export.subscriber import PlotSubscriber, name_results
from ikkuna.numerics.accuracy import shifted
from ikkuna.numerics.prediction import PREDICTION_FIGURES, prediction_figures
from ikkuna_subscribers._helpers.arguments import require_integers

__all__ = ["PredictionSubscriber"]


class PredictionSubscriber(PlotSubscriber):
    r"""Figures of the outputs and labels of a classification: cross-entropy, entropies, scale, and dependence on the input.

    Takes the arguments of the loss module (see ``Exporter.set_loss``): outputs (N, C, …) and class labels (N, …).
    Publishes ``output_dependence``, ``output_cross_entropy``, ``output_classes``, ``output_is_probability``, ``output_magnitude``,
    ``output_log_normalizer``, ``prediction_entropy``, ``label_entropy``, ``label_mean``, ``label_variance``, ``label_count``,
    ``output_binary_cross_entropy``, ``output_in_unit_interval`` and ``output_uniform_cross_entropy``,
    see `ikkuna.numerics.prediction.prediction_figures`; entropies are in nats.
    Labels that are numbers between 0 and 1 have ``output_dependence``, ``output_magnitude``, ``output_binary_cross_entropy`` and
    ``output_in_unit_interval``, other losses only ``output_dependence``; an undefined figure is not published.
    Of several micro-batches and ranks the last one counts.

    Look for: an ``output_dependence`` near 0, because the outputs are the same for every input;
    a ``prediction_entropy`` of 0 while that of the labels is not; a first ``output_cross_entropy`` or ``loss`` above
    ``output_uniform_cross_entropy``, the logarithm of the number of classes, which a network that guesses reaches.

    Parameters
    ----------
    ignore_index : int
        The label of items that are left out.
    shift : int
        See `TrainAccuracySubscriber`.
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> PredictionSubscriber().publishes[:2]
    ('output_dependence', 'output_cross_entropy')
    """

    merge = "last"

    def __init__(self, *, ignore_index: int = -100, shift: int = 0, **options: Any) -> None:
        require_integers("PredictionSubscriber", least=0, shift=shift)
        name_results(options, *PREDICTION_FIGURES)
        super().__init__(["network_output", "input_labels"], join=True, **options)
        self.ignore_index = ignore_index
        self.shift = shift

    def measure(self, bundle: MessageBundle) -> Tensor | None:
        """Return all figures."""
        outputs, labels = shifted(bundle["network_output"].data, bundle["input_labels"].data, self.shift)
        return prediction_figures(outputs, labels, self.ignore_index)

    def compute(self, bundle: MessageBundle) -> None:
        """Emit the figures that are defined."""
        for kind, value in zip(self.publishes, bundle.data, strict=True):
            if not math.isnan(value):
                self.emit(bundle, value, kind)
