"""The learning rates of a step."""

from dataclasses import replace
from typing import Any

from ikkuna.export.messages import NetworkMessage
from ikkuna.export.subscriber import PlotSubscriber

__all__ = ["LearningRateSubscriber"]


class LearningRateSubscriber(PlotSubscriber):
    """The learning rates of the optimizers' parameter groups.

    Takes ``batch_finished`` and publishes ``learning_rate``, one series for each group: under the group's ``name`` if it has one,
    otherwise as ``group 0``, numbered over all optimizers of the step.  A single unnamed group has no name.
    It is the rate that the step used, before a scheduler changes it.  Skipped steps and groups without a rate publish nothing.

    Look for: a schedule that differs from the intended one; a rate that never warms up.

    Parameters
    ----------
    **options : Any
        See `Subscriber`.

    Examples
    --------
    >>> LearningRateSubscriber().publishes
    ('learning_rate',)
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("publishes", "learning_rate")
        super().__init__("batch_finished", **options)

    def compute(self, message: NetworkMessage) -> None:
        """Emit the rate of each group."""
        if message.skipped:
            return
        reported = (message.data or {}).get("learning_rates", {})
        rates = {name: rate for name, rate in reported.items() if rate is not None}
        for name, rate in rates.items():
            group = f"group {name}" if name.isdigit() else name
            self.emit(replace(message, path="" if list(rates) == ["0"] else group), rate)
