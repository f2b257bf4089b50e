"""Rules about attention heads and experts."""

from collections.abc import Iterator
from statistics import median

from ikkuna.diagnosis import History, Rule, Score
from ikkuna.diagnosis.mistakes import names
from ikkuna_subscribers.rules.figures import sources


class AttentionCollapseRule(Rule):
    """The attention of half of the heads of a module has no entropy left, though it had at first.

    The figure is the median over heads of the evenness, the entropy over that of even attention.
    Threshold: 0.02, in 3 samples in a row, if the first sample was above 0.2; heads that attend to one key,
    such as that before, are usual, but not half of all heads from a start that is even.
    Cannot see: attention that `AttentionSubscriber` does not measure; a collapse before the first sample.
    """

    name = "attention_collapse"
    severity_while_falling = "info"
    needs = sources("attention_evenness")
    thresholds = ("evenness",)
    evenness: float = 0.02
    explains = names("vanishing_gradient plateau no_learning")
    meaning = "Half of the heads of this module attend to a single key (evenness {figure:.2g})."
    advice = "lower the learning rate, lengthen the warm-up, or normalise queries and keys"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each module with attention."""
        heads: dict[str, list[tuple[float, float]]] = {}
        for name, curve in history.fresh("attention_evenness"):
            if curve.last == curve.last and curve.first[0] == curve.first[0]:
                heads.setdefault(name.partition(":")[0], []).append((curve.first[0], curve.last))
        for module, values in heads.items():
            begin, figure = (median(column) for column in zip(*values, strict=True))
            if begin > 0.2:
                yield Score(self.evenness / max(figure, 1e-9), figure, module)


class IdleExpertsRule(Rule):
    """Half of the experts of a router receive no token, so the network has fewer parameters than it seems to have.

    Threshold: half of the experts, over the window of `RouterSubscriber`, for 3 samples in a row;
    a router without a loss that balances the load usually keeps a few dead experts, which is no mistake of the loop.
    Cannot see: routers without `RouterSubscriber`, because the number of experts of a token is not known;
    experts that are uneven without being dead (that is the rule overloaded_experts).
    """

    name = "idle_experts"
    severity_while_falling = "info"
    needs = sources("dead_experts")
    thresholds = ("share",)
    share: float = 0.5
    explains = names("overloaded_experts")
    meaning = "{figure:.0%} of the experts of this router have received no token for a whole window."
    advice = "add or increase the loss that balances the load, or the noise of the router"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each router."""
        for name, curve in history.fresh("dead_experts"):
            yield Score(curve.last / self.share, curve.last, name)


class OverloadedExpertsRule(Rule):
    """An expert of a router receives many times the mean number of tokens.

    The figure is the load of the fullest expert over the window of `RouterSubscriber`.
    Threshold: 4 times the mean, for 3 samples in a row; at the capacity factors of Fedus et al. (2021), 1 to 2,
    half of its tokens are dropped then, and without a capacity the others wait for it.
    With two tokens for an expert in a sample, chance gives about 2 in a window of 10.
    Cannot see: routers without `RouterSubscriber`, because the number of experts of a token is not known;
    routers whose tokens choose a quarter of the experts or more, of which none can have this load.
    """

    name = "overloaded_experts"
    severity_while_falling = "info"
    needs = sources("window_load_max")
    thresholds = ("load",)
    load: float = 4.0
    meaning = "One expert of this router receives {figure:.1f} times the mean number of tokens."
    advice = "add or increase the loss that balances the load, or lower the learning rate of the router"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each router."""
        for name, curve in history.fresh("window_load_max"):
            yield Score(curve.last / self.load, curve.last, name)
