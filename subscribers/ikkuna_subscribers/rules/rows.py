"""Rules about the rows of the inputs: equal ones, their labels, their order, and those of evaluations."""

from collections.abc import Iterator, Sequence
from typing import Any

from ikkuna.diagnosis import History, Network, Rule, Score, TimeSeries
from ikkuna.diagnosis.mistakes import names
from ikkuna_subscribers.input_rows import InputRowsSubscriber
from ikkuna_subscribers.predictions import PredictionSubscriber
from ikkuna_subscribers.rules.figures import sources

_EVALUATIONS = ("testing", "validation")
_FIRST = 8  # steps that are all sampled


class _RowRule(Rule):
    """A rule that reads what is published about the rows of the inputs."""

    severity_while_falling = "warning"

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return a subscriber for the rows."""
        return (InputRowsSubscriber(first=_FIRST, subsample=every),)

    def _is_new(self, history: History, name: str, curve: TimeSeries) -> bool:
        """Return whether the series of a pass has a value since the last judgement."""
        seen = history.memory[self.name]
        before, seen[name] = seen.get(name), curve.count
        return before != curve.count


class ContradictingLabelsRule(_RowRule):
    """Rows of a batch are equal to the last bit, and have different labels.

    No function of the inputs predicts these labels.
    Threshold: a fifth of the rows that have an equal row in their batch, in at least 3 samples.
    Cannot see: equal rows that never meet in a batch; labels that are numbers, or several classes for each row, as of tokens;
    rows with little information, such as a few columns of categories, in which different labels are usual.
    """

    name = "contradicting_labels"
    needs = sources("input_rows_contradicted")
    thresholds = ("share",)
    share: float = 0.2
    patience = 1
    explains = names("no_learning plateau overfit")
    meaning = "Rows of a batch have the same inputs and different labels: {figure:.0%} of those with an equal row."
    advice = "check how inputs and labels are joined, and rows that could not be read; remove repeated rows"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        curve = history.now("input_rows_contradicted")
        if curve is not None:
            values = list(curve.values)
            figure = sum(values) / len(values)
            yield Score(figure / self.share if sum(value > 0 for value in values) >= 3 else 0.0, figure)


class LabelsRepeatedRule(_RowRule):
    """Each batch has the labels of the first one, while its inputs are others.

    Threshold: a fact, for 5 samples in a row, in which at least three rows have come with other labels than before.
    Cannot see: rows that do not come again, as those of one epoch or of augmented data; labels that are numbers, or several classes for
    each row; fewer than 16 rows in a batch.
    """

    name = "labels_repeated"
    needs = sources("input_labels_repeats")
    thresholds = ("samples",)
    samples: float = 5
    patience = 1
    explains = names("no_learning plateau overfit ignores_input class_collapse")
    meaning = "{figure:.0f} sampled batches in a row have the same labels, although their inputs differ: rows come again with other labels."
    advice = "search for labels that are read before the loop, and for a variable that keeps those of an earlier batch"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        if (curve := history.now("input_labels_repeats")) is not None:
            yield Score(curve.last / self.samples, curve.last)


class TrainingRowsEvaluatedRule(_RowRule):
    """Rows of an evaluation are rows of the training, to the last bit.

    The figure is a lower bound, because the training is sampled: the share of the last rows of each of up to 10 passes.
    Threshold: 0.1, at the second pass and later.
    Cannot see: the evaluation of a compiled model; training rows that are augmented, or of steps with fewer labels; passes whose last batch
    has none.
    """

    name = "training_rows_evaluated"
    needs = sources("input_rows_known")
    thresholds = ("share",)
    share: float = 0.1
    patience = 1
    meaning = "At least {figure:.0%} of the rows of the evaluation are rows of the training, so it does not show what new data would."
    advice = "split the data before it is augmented or repeated, and evaluate on rows that the training does not have"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each new pass."""
        for name in _EVALUATIONS:
            curve = history.curve("input_rows_known", name)
            if curve is None or not self._is_new(history, name, curve):
                continue
            values = curve.tail(10)
            figure = sum(values) / len(values)
            yield Score(figure / self.share if len(values) > 1 else 0.0, figure)


class EvaluationInputsRule(_RowRule):
    """The inputs of an evaluation have another mean or another scale than those of the training.

    The figure is the larger one of two: the distance of the mean from those of the training's batches in 1.5 of their deviations, and the
    ratio of the deviation to theirs, or its inverse, over 2.5; each compared with the nearest of the last 20 sampled batches.
    Threshold: 1, for 2 passes in a row.
    Cannot see: inputs that are integers; a change that leaves mean and deviation as they are, as of the order of channels.
    """

    name = "evaluation_inputs"
    needs = sources("input_rows_mean", "input_rows_deviation")
    thresholds = ("limit",)
    limit: float = 1.0
    patience = 2
    meaning = "The inputs of the evaluation differ from those of the training: {figure:.2g} times the limit for mean and scale."
    advice = "apply the same normalisation to the inputs of training and evaluation; remove a trend, for example by differences"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield a score for each new pass."""
        mean, deviation = (history.curve(kind) for kind in (*self.needs,))
        if mean is None or deviation is None:
            return
        for name in _EVALUATIONS:
            here, spread = (history.curve(kind, name) for kind in (*self.needs,))
            if here is None or spread is None or not self._is_new(history, name, here):
                continue
            known = [(m, d) for m, d in zip(mean.tail(20), deviation.tail(20), strict=True) if d > 0]
            if not known or not spread.last > 0:
                continue
            shift = min(abs(here.last - m) / d for m, d in known)
            ratio = min(max(spread.last / d, d / spread.last) for _, d in known)
            figure = max(shift / 1.5, ratio / 2.5)
            training = f"in training {mean.last:.3g} and {deviation.last:.3g}"
            detail = f"Their mean and deviation are {here.last:.3g} and {spread.last:.3g}, {training}."
            yield Score(figure / self.limit, figure, detail=detail)


class BatchTwiceRule(_RowRule):
    """Each batch of rows comes several times in a row, as from workers with equal seeds.

    Threshold: a fact: one of the first 8 batches equals that of the step before to the last bit, in the same order, and at least 3 of
    the later samples are new.  Labels are classes; a loop that takes several steps with each batch on purpose is usual for other losses.
    Cannot see: batches that are augmented after they were drawn; the repetition of a single row.
    """

    name = "batch_twice"
    needs = sources("input_batch_age", "input_batch_repeats")
    uses = sources("output_classes")
    judged_on = frozenset(needs)
    patience = 1
    meaning = "Each batch comes several times in a row: {figure:.0f} of the sampled ones are equal to that of the step before."
    advice = (
        "give each worker of the loader a seed of its own (worker_init_fn, generator), "
        "and divide the data of an IterableDataset between them"
    )

    def subscribers(self, network: Network, every: int) -> Sequence[Any]:
        """Return subscribers for the rows, and for outputs and labels."""
        return (*super().subscribers(network, every), PredictionSubscriber(subsample=every))

    def scores(self, history: History) -> Iterator[Score]:
        """Yield one score for the network."""
        age, repeats = (history.now(kind) for kind in (*self.needs,))
        if age is not None and repeats is not None and history.curve("output_classes") is not None:
            new = sum(value == 0 for step, value in zip(age.steps, age.values, strict=True) if step >= _FIRST)
            yield Score(float(repeats.last > 0 and new >= 3), repeats.last)


class SameOrderRule(_RowRule):
    """Batches come again with the same rows in the same order: the data is not shuffled anew in each epoch.

    Windows of one long text, and steps on all data, do this on purpose; the finding is therefore only an info.
    Threshold: a fact, for 3 samples in a row, whose batches are not those of the sample before and come again after as many steps.
    Cannot see: batches that are augmented; a batch that comes again after more than 1,024 sampled ones.
    """

    name = "same_order"
    version = 2
    needs = sources("input_batch_age")
    severity = "info"
    meaning = "The batches come again in the same order with the same rows, those of {figure:.0f} steps before."
    advice = "shuffle the data anew in each epoch: shuffle=True, a generator that is seeded once, set_epoch()"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the batch is one of an earlier sample, but not of the last one."""
        curve = history.now("input_batch_age")
        if curve is not None and len(curve.steps) > 1:
            is_periodic = curve.values[-2] in (0, curve.last)
            yield Score(float(is_periodic and curve.last > curve.step - curve.steps[-2]), curve.last)


class RepeatedBatchRule(_RowRule):
    """Every sampled step has the inputs of the sample before, to the last bit.

    Training on one batch, or on all data in every step, does this on purpose; the finding is therefore only an info.
    Threshold: a fact, for 5 samples in a row, of which the first ones are of successive steps.
    Cannot see: a batch that is repeated with noise; steps of several forwards, of which the inputs of the last one are read,
    such as the points at the boundary of a differential equation.
    """

    name = "repeated_batch"
    version = 3
    needs = sources("input_batch_age", "input_batch_repeats")
    uses = sources("micro_batches")
    severity = "info"
    patience = 5
    meaning = "Every sampled step has the same inputs, also those of successive steps: this is one batch, or all data."
    advice = "check the sampler and the data loader, unless every step is meant to have all data"

    def scores(self, history: History) -> Iterator[Score]:
        """Yield 1 if the batch is that of the last sample."""
        age, repeats = (history.now(kind) for kind in (*self.needs,))
        forwards = history.curve("micro_batches")
        if forwards is not None and forwards.last > 1:
            return
        if age is not None and repeats is not None and len(age.steps) > 1:
            yield Score(float(0 < age.last <= age.step - age.steps[-2] and repeats.last > 1), repeats.last)
