"""Training in evaluation mode."""

from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources
from ikkuna_subscribers.module_state import ModuleStateSubscriber

__all__ = ["EvaluationModeRule"]


class EvaluationModeRule(Rule):
    """Every module is in evaluation mode in training steps, and the network has dropout or batch norm.

    Threshold: a fact, without a number, for 3 samples in a row.
    Cannot see: a single layer in the wrong mode, because frozen batch norms are usual in fine-tuning.
    """

    name = "evaluation_mode"
    needs = sources("evaluation_mode")
    uses = sources("weight_requires_grad")
    severity = "error"
    explains = frozenset(("overfit", "loss_spike"))
    meaning = (
        "The network is in evaluation mode while it trains: dropout is off, and batch norm uses its running statistics."
    )
    advice = "call model.train() after each evaluation"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the flags of modules."""
        return (ModuleStateSubscriber(subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield the share of modules in evaluation mode if it is 1."""
        curve = history.now("evaluation_mode")
        if curve is None:
            return
        classes = [entry.class_name for entry in history.network.modules]
        depends = any("BatchNorm" in name or "Dropout" in name for name in classes)
        yield Score(float(curve.last >= 1 and depends), curve.last)
