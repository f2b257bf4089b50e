"""Tied weights that came apart."""

from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources
from ikkuna_subscribers.module_state import ModuleStateSubscriber

__all__ = ["UntiedWeightsRule"]


class UntiedWeightsRule(Rule):
    """An output layer and an embedding had one weight, or equal weights, and have two now.

    A copy of a model, an assignment of new parameters, or the loading of a checkpoint separates them; each is then trained by itself.
    Threshold: a fact, without a number, at one sample.
    Cannot see: weights that should be tied according to a configuration and had different values from the start
    (that is the check untied_weights of ``ikkuna.preflight``); tied weights of other layers than embeddings and linear ones.
    """

    name = "untied_weights"
    needs = sources("untied_weights")
    patience = 1
    severity = "error"
    explains = frozenset(("not_in_optimizer", "never_moves", "no_gradient"))
    meaning = "The weight of this layer is no longer that of the embedding, although both were tied."
    advice = "assign the weight of the embedding again after the model has been copied or loaded, before the optimizer is created"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the flags of modules."""
        return (ModuleStateSubscriber(subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each layer whose weight is no longer tied."""
        for name, curve in history.fresh("untied_weights"):
            yield Score(curve.last, curve.last, name)
