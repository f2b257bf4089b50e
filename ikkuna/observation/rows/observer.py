"""Observers of whole steps of an exporter, beside the subscribers."""

from typing import Any

from ikkuna.metrics.messages.message import NetworkMessage
from ikkuna.metrics.messages.stamp import Stamp
from ikkuna.observation.rows.plan import Plan
from ikkuna.observation.rows.rows import Rows

__all__ = ["StepObserver"]


class StepObserver:
    """Observes the steps of one exporter; its methods do nothing by default.

    They raise nothing but exceptions that belong to the user.
    """

    def step_opened(self, stamp: Stamp, plan: Plan) -> None:
        """Handle the beginning of a step, before the first forward."""

    def model_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle what the model is called with in a step, borrowed."""

    def loss_called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Handle what the loss module is called with in a step, borrowed."""

    def step_passed(self, stamp: Stamp) -> None:
        """Handle the end of a step that no subscriber samples, so that it has no rows."""

    def rows_complete(self, rows: Rows, event: NetworkMessage) -> None:
        """Handle the complete measurements of a training step, before they are delivered to subscribers."""

    def step_delivered(self, stamp: Stamp) -> None:
        """Handle the end of the delivery, also after an exception."""
