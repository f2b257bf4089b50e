"""Rules about what optimizers own, and tied weights."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score
from ikkuna.diagnosis.mistakes import NOT_IN_OPTIMIZER, UNTIED_WEIGHTS, names
from ikkuna_subscribers.activations import ModuleStateSubscriber
from ikkuna_subscribers.rules.figures import sources
from ikkuna_subscribers.training import OptimizerStateSubscriber


class OptimizerResetRule(Rule):
    """The optimizer's own count of steps does not grow: it is created again, and its state is lost.

    Threshold: the count does not grow, and is below half of the number of steps that its kept samples span, for 3 samples in a row, in
    each of up to five weights that are spread over the network: a single one, such as that of an expert without tokens, may have received
    no gradient.  The samples of the rule can be of successive steps, in which a new optimizer counts 1.
    It is an info from the third time on that the counts of all these weights have fallen: each phase of a training may have an optimizer of
    its own, but one that is created again in each epoch begins each with steps of another size.
    Cannot see: optimizers without a count of steps, such as SGD; an optimizer that is created once more on purpose.
    """

    name = "optimizer_reset"
    version = 2
    severity_while_falling = "warning"
    needs = sources("weight_state_step_mean")
    severity = "error"
    explains = names("no_learning plateau")
    meaning = "The optimizer has counted only {figure:.0f} steps since it was created, again and again."
    advice = "create the optimizer once, before the loop"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the counts of up to five weights."""
        names = [entry.name for entry in network.modules if any(role == "weight" for role, _ in entry.parameters)]
        if not names:
            return ()
        chosen = [names[round(i * (len(names) - 1) / 4)] for i in range(5)]
        return (OptimizerStateSubscriber("step", "mean", modules=[*dict.fromkeys(chosen)], subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        curves = [curve for _, curve in history.fresh("weight_state_step_mean") if len(curve.values) > 1]
        if not curves:
            return
        memory = history.memory[self.name]
        is_new = all(c.values[-2] >= c.last and 2 * c.last < c.steps[-1] - c.steps[0] for c in curves)
        memory["new in a row"] = new_in_a_row = memory.get("new in a row", 0) + 1 if is_new else 0
        memory["falls"] = falls = memory.get("falls", 0) + all(c.values[-2] > c.last for c in curves)
        at_most = "error" if new_in_a_row >= self.patience else "info"
        yield Score(float(is_new or falls >= 3), max(c.last for c in curves), at_most=at_most)


class NotInOptimizerRule(Rule, mistake=NOT_IN_OPTIMIZER):
    """A trainable parameter belongs to no optimizer, so it never changes.

    Every optimizer of the process counts.
    Threshold: a fact, without a number, for 2 samples in a row: the first one cannot show whether the weight moves.
    The rule is silent if the norm of the module's weight changes, because something else writes it, such as the average of a target
    network or an update by hand beside the optimizer, and if no gradient reaches this weight, because then nothing is meant to train it.
    Cannot see: parameters of modules that are not observed; a run in which a step is made by hand.
    """

    version = 3
    needs = sources("unowned_parameters")
    uses = sources("weights_norm2", "weight_gradients_norm2")
    judged_on = frozenset(needs)
    patience = 2

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each parameter without an optimizer, and 0 for one that has got an optimizer."""
        for name, curve in history.curves("unowned_parameters").items():
            is_unowned = bool(name) and curve.step == history.step
            is_silent = not is_unowned or _is_written_otherwise(history, name or "", curve.first_steps[0])
            yield Score(0.0 if is_silent else curve.last, 1.0, name)


_ROUNDING = 1e-6
"""Norms of one weight differ by less than this, relatively: other statistics of a step add the squares in another order."""


def _is_written_otherwise(history: History, name: str, since: int) -> bool:
    """Return whether a weight of the same module changes from a step on, or no gradient reaches it while these are measured."""
    module, gradients = history.network.module(name), history.curves("weight_gradients_norm2")
    weights = {
        other: c for other, c in history.curves("weights_norm2").items() if history.network.module(other) == module
    }
    is_written = any(
        step >= since and not math.isclose(value, curve.last, rel_tol=_ROUNDING)
        for curve in weights.values()
        for step, value in curve.kept().items()
    )
    return is_written or bool(gradients and weights and not weights.keys() & gradients.keys())


class FrozenInsideRule(Rule):
    """A weight matrix is frozen although one before it and one behind it are trained.

    Networks are usually frozen from the input on, or everywhere but in adapters.
    The rule is silent if most of the matrices are frozen.
    Threshold: at most a quarter of the matrices.
    Cannot see: a layer that is frozen on purpose; the finding is therefore only an info.
    """

    name = "frozen_inside"
    severity_while_falling = "warning"
    needs = sources("weight_requires_grad")
    thresholds = ("share",)
    share: float = 0.25
    severity = "info"
    patience = 1
    meaning = "The weight is frozen, while weights before and behind it are trained."
    advice = "call requires_grad_(True) if this is not intended"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each frozen matrix behind a trained one."""
        curves = history.curves("weight_requires_grad")
        flags = [(name, curve.last > 0) for name, curve in curves.items() if name and history.network.is_matrix(name)]
        trained = [i for i, (_, is_trained) in enumerate(flags) if is_trained]
        if not trained:
            return
        inside = [name for name, is_trained in flags[trained[0] : trained[-1]] if not is_trained]
        if 0 < len(inside) <= max(self.share * len(flags), 1):
            yield from (Score(1.0, 0.0, name) for name in inside)


class FrozenStatisticsRule(Rule):
    """A batch normalization is frozen with the layers before it, but in training mode: its running statistics go on to change.

    Threshold: a fact, for 3 samples in a row: its weight and every matrix before it are frozen, others are trained, and no module of the
    network is in evaluation mode.
    Cannot see: a network of which some modules are in evaluation mode; whether the statistics are meant to follow the
    data; the finding is therefore only an info.
    """

    name = "frozen_statistics"
    severity_while_falling = "info"
    severity = "info"
    needs = sources("weight_requires_grad", "evaluation_mode")
    judged_on = frozenset(("evaluation_mode",))
    explains = names("running_statistics")
    meaning = "This batch normalization is frozen, but in training mode: it normalises with each batch, and its running statistics change."
    advice = "call eval() on the frozen part after each model.train()"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each frozen batch normalization."""
        mode, network = history.now("evaluation_mode"), history.network
        flags = [(name or "", curve.last > 0) for name, curve in history.curves("weight_requires_grad").items()]
        if mode is None or not any(is_trained for _, is_trained in flags):
            return
        are_frozen = True
        for name, is_trained in flags:
            are_frozen = are_frozen and not is_trained
            if "BatchNorm" in network.class_of(name):
                yield Score(float(are_frozen and mode.last == 0), mode.last, name)


class UntiedWeightsRule(Rule, mistake=UNTIED_WEIGHTS):
    """An output layer and an embedding had one weight, or equal weights, and have two now.

    A copy of a model, an assignment of new parameters, or the loading of a checkpoint separates them; each is then trained by itself.
    Threshold: a fact, without a number, at one sample.
    Cannot see: weights that should be tied according to a configuration and had different values from the start
    (that is the check untied_weights of ``ikkuna.preflight``); tied weights of other layers than embeddings and linear ones.
    """

    needs = sources("untied_weights")
    patience = 1

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the flags of modules."""
        return (ModuleStateSubscriber(subsample=every),)

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 for each layer whose weight is no longer tied."""
        for name, curve in history.fresh("untied_weights"):
            yield Score(curve.last, curve.last, name)
