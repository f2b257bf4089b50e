"""Weights that differ between ranks."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import distributed

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna_subscribers._helpers.rule_sources import sources
from ikkuna_subscribers.rank_spread import RankSpreadSubscriber

__all__ = ["RanksDifferRule"]


class RanksDifferRule(Rule):
    """A weight that was equal on all ranks differs between them.

    The figure is the difference between the largest and the smallest norm of a weight over ranks, relative to the largest.
    Threshold: 1e-5, for 2 samples in a row; the norms of equal weights differ by rounding only, by less than 1e-6.
    If a norm differs in the first sample, the weights are shards, as those of FSDP, and none is judged.
    Cannot see: ranks whose weights differ from the first step on; buffers; differences that leave the norm unchanged;
    a run with one process.
    """

    name = "ranks_differ"
    needs = sources("weights_ranks_norm2_min", "weights_ranks_norm2_max")
    judged_on = frozenset(("weights_ranks_norm2_max",))
    thresholds = ("difference",)
    difference: float = 1e-5
    patience = 2
    severity = "error"
    meaning = "The norms of this weight differ between ranks by a share of {figure:.1g}, but were equal before."
    advice = "search for parameters that change outside of the optimizer, and for gradients that are not reduced over all ranks"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber if there are several ranks."""
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return ()
        return (RankSpreadSubscriber("weights", "norm2", subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each weight."""
        smallest = history.curves("weights_ranks_norm2_min")
        figures = {
            name: 1 - smallest[name].last / curve.last
            for name, curve in history.fresh("weights_ranks_norm2_max")
            if name in smallest and curve.last > 0
        }
        largest = max(figures.values(), default=0.0)
        if history.memory[self.name].setdefault("has_shards", largest >= self.difference):
            return
        for name, figure in figures.items():
            yield Score(figure / self.difference, figure, name)
