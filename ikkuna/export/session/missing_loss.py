"""Warns of a loss that subscribers want, and that cannot be seen."""

from ikkuna.export.hooks.context import HookContext
from ikkuna.export.hooks.loss import LossHooks
from ikkuna.logger import log

__all__ = ["MissingLossWarning"]


class MissingLossWarning:
    """Warns once that a subscriber wants the loss or the labels, and they are unknown.

    Parameters
    ----------
    context : HookContext
    losses : LossHooks
        Knows whether a loss and labels were seen.
    """

    def __init__(self, context: HookContext, losses: LossHooks) -> None:
        self._context, self._losses = context, losses
        self._has_warned = False

    def step_ended(self, steps: int) -> None:
        """Warn at the end of a sampled step, if there is a reason to.

        Parameters
        ----------
        steps : int
            Number of training steps so far.
        """
        if not self._has_warned and not self._is_early(steps) and (missing := self._missing()):
            self._has_warned = True
            log.warning(
                "a subscriber wants %s, which cannot be seen; set the module or function that computes the loss, and call what "
                "set_loss() returns: loss = exporter.set_loss(loss)",
                missing,
            )

    def _is_early(self, steps: int) -> bool:
        """Return whether it cannot be known yet how the model is called.

        The first step only shows that a model is never called as a whole; a model in evaluation mode seems to be such for two steps.
        """
        whole = self._context.model.roots.whole
        return self._context.tracker.is_rootless and steps <= (1 if whole is None or whole.training else 2)

    def _missing(self) -> str:
        """Return what is wanted and unknown; empty if nothing is."""
        plan = self._context.recorder.plan
        if not self._context.model.sees_loss:
            return ""
        if not self._losses.has_loss and (plan.together or "loss" in plan.kinds):
            return "the loss"
        if not self._losses.has_labels and (plan.together or "input_labels" in plan.kinds):
            return "the labels"
        return ""
