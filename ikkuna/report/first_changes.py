"""Finds what changed first before a jump of the loss: the series that left their own bands, in the order of training."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ikkuna.diagnosis import Findings, get_rules
from ikkuna.errors import ConfigError
from ikkuna.numerics.bands import running_band
from ikkuna.numerics.spike_score import LIMIT, spike_scores
from ikkuna.report.difference import training_order
from ikkuna.store import SeriesValues, StoredRun
from ikkuna.store.quantity import Quantity, built_in_sources, step_order
from ikkuna.store.values import ModuleOrder

_BEFORE = 80  # values of a series before the step that are read
_SPIKE = "loss_spike"  # the rule that reads losses between samples as well
_RECENT = 1  # samples between the end of a change and the step

_CAUSES = (  # by the tensors that a kind is computed from
    ({"batch_finished"}, "the learning rate changed", "look at the schedule"),
    (
        {"input_data", "input_labels", "layer_inputs"},
        "the batch is unlike the others",
        "look at the batch; normalise or skip it",
    ),
    (
        {"activations", "network_output", "observed"},
        "this layer is unstable, or an update before has changed it",
        "normalise its inputs, or clip gradients",
    ),
    ({"loss"}, "only the loss changed: the labels of the batch are unlike the others", "look at the labels"),
    (
        {"weight_updates", "bias_updates", "weights", "biases"},
        "the updates are too large",
        "lower the learning rate, or warm up",
    ),
    (
        {
            *("layer_gradients", "weight_gradients", "bias_gradients", "weight_gradients_unclipped"),
            *("bias_gradients_unclipped", "weight_micro_gradients", "bias_micro_gradients"),
        },
        "a few samples have large gradients",
        "clip gradients",
    ),
)


@dataclass(frozen=True, slots=True)
class Change:
    """A series that left its own band.

    Parameters
    ----------
    step : int
        The first step outside the band.
    module : str or None
        The name of the series; ``None`` for the network.
    kind : str
        The kind.
    value, usual : float
        The value at this step, and the running median before it.
    distance : float
        The distance from the median in half-widths of the band, see `ikkuna.numerics.bands.running_band`.
    finding : str
        The rule of the finding that it belongs to; empty if there is none.
    """

    step: int
    module: str | None
    kind: str
    value: float
    usual: float
    distance: float
    finding: str


@dataclass(frozen=True, slots=True)
class FirstChanges:
    """The series that changed around a step.

    Parameters
    ----------
    step : int or None
        The step in question; ``None`` if no step was given and the loss has no spike or was not stored.
    changes : tuple of Change
        The changes, in the order of steps, and within a step in the order of training.
    cause : tuple of str, optional
        The usual meaning of the first change, and a remedy.
    """

    step: int | None
    changes: tuple[Change, ...] = ()
    cause: tuple[str, str] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the cause as plain values."""
        cause, remedy = self.cause or (None, None)
        return asdict(self) | {"cause": cause, "remedy": remedy}


def first_changes(run: StoredRun, step: int | None = None, findings: Findings | None = None) -> FirstChanges:
    """Return the series that left their bands around a step.

    A series counts if it is outside its band at the last sample up to `step`, at the next one if it has none there,
    or at the one before; its change begins at the first of the samples in a row that are outside.

    Parameters
    ----------
    run : StoredRun
        The run.
    step : int, optional
        The step; by default the first one at which the loss is a spike.
    findings : Findings, optional
        The findings of the run, to which changes are assigned; they also know of spikes between the stored losses.

    Raises
    ------
    ConfigError
        If the run has no such step.
    """
    if step is None:
        stored = _first_jump(run.series("loss")) if None in run.names("loss") else None
        seen = next((finding.step for finding in findings or () if finding.rule == _SPIKE), None)
        if (step := min((each for each in (stored, seen) if each is not None), default=None)) is None:
            return FirstChanges(None)
    if not 0 <= step <= run.last_step:
        raise ConfigError(f"'{run.path}' has the steps 0 to {run.last_step}, got --step {step}")
    changes = []
    for kind in run.kinds():
        if not run.quantity(kind).is_comparable:  # times, for example
            continue
        for name in run.names(kind):
            if (found := _change(run.series(kind, name), step)) is not None:
                at, value, usual, distance = found
                changes.append(Change(at, name, kind, value, usual, distance, _rule_of(kind, name, findings)))
    order = ModuleOrder(run.modules)
    places = {kind: step_order(kind, run.quantities) for kind in run.kinds(None)}
    changes.sort(key=lambda change: training_order(change.step, change.kind, change.module, order, places))
    return FirstChanges(step, tuple(changes), _cause(changes[0].kind, run.quantities) if changes else None)


def _cause(kind: str, quantities: Mapping[str, Quantity]) -> tuple[str, str] | None:
    sources = built_in_sources(kind, quantities)
    matching = [(cause, remedy) for kinds, cause, remedy in _CAUSES if kinds & sources]
    return matching[0] if 0 < len(matching) < len(_CAUSES) else None  # what is computed from everything tells no cause


def _first_jump(loss: SeriesValues) -> int | None:
    """Return the first step at which the loss is a spike or not finite."""
    jumps = spike_scores(loss.values) > LIMIT
    return int(loss.steps[jumps.argmax()]) if jumps.any() else None


def _change(series: SeriesValues, step: int) -> tuple[int, float, float, float] | None:
    """Return step, value, usual value and distance of the change of a series around a step."""
    end = int(np.searchsorted(series.steps, step, "right"))
    if end < len(series.steps) and (end == 0 or series.steps[end - 1] != step):
        end += 1  # a series without a sample at this step
    start = max(end - _BEFORE, 0)
    steps, values = series.steps[start:end], series.values[start:end]
    band = running_band(values)
    outside = np.flatnonzero(band.distance[-1 - _RECENT :] > 1)
    if not len(outside):
        return None
    last = max(len(values) - 1 - _RECENT, 0) + int(outside[0])
    while last > 0 and band.distance[last - 1] > 1:
        last -= 1
    return int(steps[last]), float(values[last]), float(band.median[last]), float(band.distance[last])


def _rule_of(kind: str, name: str | None, findings: Findings | None) -> str:
    """Return the rule of the finding that is about a series, or that its rule has derived from series of this kind."""
    found = list(findings or ())
    for finding in found:
        modules = {*finding.modules, finding.module}
        if finding.kind == kind and (name in modules or modules == {None}):
            return finding.rule
    needs = {rule.name: {*rule.needs, *rule.uses} for rule in get_rules("all")} if found else {}
    for finding in found:
        if kind in needs.get(finding.rule, ()) and name in {*finding.modules, finding.module}:
            return finding.rule
    return ""
