"""Runs a program alone, watched by default, watched at every step, and with the reference, and compares."""

import copy
import random
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ikkuna
from ikkuna.export.subscriber import MeanSubscriber, MinMaxSubscriber, NormSubscriber, VarianceSubscriber
from ikkuna.testing import RecordingBackend
from tests.real_models.comparison import differences, errors, logged
from tests.real_models.reference import KINDS, STATISTICS
from tests.trial.program import Program, Training
from tests.trial.reference import TurnsReference

__all__ = ["Result", "measure"]

LAYERS = ("activations", "layer_gradients")
SEVERITIES = ("info", "warning", "error")


@dataclass
class Result:
    """The results of the runs of a program.

    Parameters
    ----------
    steps : list of int
        The number of steps of each watched model.
    values : int
        The number of values that were compared with the reference.
    cost : float
        Milliseconds of the processor for each iteration at default settings, beyond those of the program; 0 if there is one iteration.
    alone : float
        Milliseconds of the program itself for each iteration.
    findings : dict
        The gravest severity and the text by the name of the rule.
    wrong : list of str
        Everything that is not as it should be.
    """

    steps: list[int] = field(default_factory=list)
    values: int = 0
    cost: float = 0.0
    alone: float = 0.0
    findings: dict[str, list[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def as_json(self):
        """Return a mapping for a file, without details of what is wrong beyond the first ten."""
        return asdict(self) | {"wrong": self.wrong[:10]}


class _Played:
    """A program that has run once.

    Parameters
    ----------
    program : Program
        The program.
    watch : callable
        Called with each training before its first iteration; what it returns is kept in ``watchers``.
    """

    def __init__(self, program, watch):
        _seed(program)
        optimizers = {}

        def note(optimizer, args, kwargs):
            optimizers[id(optimizer)] = optimizer

        handle = register_optimizer_step_pre_hook(note)
        with warnings.catch_warnings(record=True) as caught, logged() as self.lines:
            warnings.simplefilter("always")
            made = program.make()
            trainings = (made,) if isinstance(made, Training) else made
            torch.manual_seed(11)
            self.watchers = [watch(training) for training in trainings]
            self.losses, self.times = [], []
            for _ in range(program.iterations):
                begin = time.process_time()
                returned = trainings[0].step()
                self.times.append(time.process_time() - begin)
                several = returned if isinstance(returned, list | tuple) else [returned]
                self.losses += [each.detach().clone() if isinstance(each, Tensor) else each for each in several]
            self.random = [torch.get_rng_state(), list(np.random.get_state()[1]), random.getstate()]
            for watcher in self.watchers:
                if watcher is not None:
                    watcher.close()
        handle.remove()
        self.warned = Counter(f"{each.category.__name__}: {str(each.message).splitlines()[0]}" for each in caught)
        self.state = {"losses": self.losses, "random": self.random}
        for number, training in enumerate(trainings):
            self.state[f"model {number}"] = copy.deepcopy(dict(training.model.state_dict()))
            self.state[f"gradients {number}"] = [_copy(p.grad) for p in training.model.parameters()]
        for number, optimizer in enumerate(optimizers.values()):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.state[f"optimizer {number}"] = {
                "parameters": [_copy(p) for p in parameters],
                "gradients": [_copy(p.grad) for p in parameters],
                "state": copy.deepcopy(optimizer.state_dict()["state"]),
                "rates": [group["lr"] for group in optimizer.param_groups if "lr" in group],
            }

    @property
    def milliseconds(self):
        """The mean time of an iteration, without the first tenth."""
        counted = self.times[len(self.times) // 10 :]
        return 1e3 * sum(counted) / len(counted)


def _seed(program):
    torch.compiler.reset()  # code of a model without hooks is not compiled again for an equal model with hooks
    torch.manual_seed(sum(map(ord, program.make.__name__)))
    np.random.seed(7)
    random.seed(7)


def _copy(tensor):
    return None if tensor is None else tensor.detach().clone()


def measure(program: Program) -> Result:
    """Run a program four times and compare."""
    result, recordings = Result(), []
    with tempfile.TemporaryDirectory() as directory:

        def watch(training, **options):
            return ikkuna.watch(training.model, loss=training.loss, log_dir=directory, verbosity=0, **options)

        def watch_all(training):
            recordings.append(RecordingBackend())
            watched = watch(training, every=1, backend=["tb", recordings[-1]])
            _register(watched.message_bus, program, recordings[-1])
            return watched

        alone = _Played(program, lambda training: None)
        by_default = _Played(program, watch)
        at_every_step = _Played(program, watch_all)
    reference = _Played(program, lambda training: TurnsReference(training.model))
    if lines := differences(reference.state, alone.state):
        result.wrong.append(f"the reference changes bits: {lines[:3]}")
    _compare_runs(result, program, alone, by_default, "by default")
    _compare_runs(result, program, alone, at_every_step, "at every step")
    result.steps = [watched.health().steps for watched in by_default.watchers]
    for recording, watched, seen in zip(recordings, at_every_step.watchers, reference.watchers, strict=True):
        if seen.step + 1 != watched.health().steps:
            result.wrong.append(f"{watched.health().steps} steps, {seen.step + 1} by the reference")
        _compare_values(result, program, recording, seen)
    _compare_losses(result, program, alone.losses, recordings)
    _judge(result, program)
    result.alone = round(alone.milliseconds, 2)
    result.cost = round(by_default.milliseconds - alone.milliseconds, 2) if program.iterations > 1 else 0.0
    return result


def _register(bus, program, recording):
    """Register the five metrics of all kinds, except those of the preset."""
    for kind in KINDS if program.layers else KINDS[2:]:
        for make in (NormSubscriber, MeanSubscriber, VarianceSubscriber, MinMaxSubscriber):
            subscriber = make(kind, backend=recording)
            if not set(subscriber.publishes) & set(bus.kinds):
                bus.register_subscriber(subscriber)


def _judge(result, program):
    """Add a line for each finding that is not judged, and for each false warning or error."""
    for rule, (severity, text) in result.findings.items():
        verdict = program.judged.get(rule, "")
        if not verdict.startswith(("true: ", "false: ")):
            result.wrong.append(f"{severity} of {rule} is not judged: {text}")
        elif verdict.startswith("false") and severity != "info":
            result.wrong.append(f"{severity} of {rule} is false: {text}")


def _compare_runs(result, program, alone, played, name):
    if lines := differences(played.state, alone.state):
        result.wrong.append(f"watched {name}, {len(lines)} tensors have other bits: {lines[:3]}")
    if new := played.warned - alone.warned:
        result.wrong.append(f"watched {name}, Python warns: {list(new)[:3]}")
    for line in played.lines:
        if not line.startswith((*program.told, *(f"{severity}: " for severity in SEVERITIES))):
            result.wrong.append(f"watched {name}, ikkuna logs: {line}")
    for expected, watched in zip(program.steps, played.watchers, strict=True):
        health = watched.health()
        if health.steps != expected:
            result.wrong.append(f"watched {name}, {health.steps} steps in place of {expected}")
        if (health.errors, health.dropped, health.disabled) != (0, 0, ()):
            result.wrong.append(f"watched {name}: {health}")
        for finding in watched.findings:
            known = result.findings.get(finding.rule)
            if known is None or SEVERITIES.index(finding.severity) > SEVERITIES.index(known[0]):
                result.findings[finding.rule] = [finding.severity, str(finding)]


def _compare_values(result, program, recording, reference):
    found, kinds = {}, KINDS if program.layers else KINDS[2:]
    for series, value, step in recording.values:
        kind, _, statistic = series.kind.rpartition("_")
        if kind not in kinds or statistic not in STATISTICS or series.pass_name != "training":
            continue
        found.setdefault((kind, series.name, step), {})[statistic] = value
    seen = {key: observation for key, observation in reference.seen.items() if key[0] in kinds}
    for what, keys in (("missing", seen.keys() - found.keys()), ("without a reference", found.keys() - seen.keys())):
        if keys:
            result.wrong.append(f"{len(keys)} rows {what}: {sorted(keys)[:4]}")
    for key in seen.keys() & found.keys():
        result.values += len(STATISTICS)
        result.wrong += errors(key, seen[key], found[key])


def _compare_losses(result, program, losses, recordings):
    """Compare the loss of each step, if the program returns it; a program with several watched models does not."""
    if any(loss is None for loss in losses) or len(recordings) != 1:
        return
    shown = {
        step: value
        for series, value, step in recordings[0].values
        if series.kind == "loss" and series.pass_name == "training"
    }
    missing = set(range(len(losses))) - shown.keys() - program.unseen
    if missing or len(losses) != program.steps[0]:
        result.wrong.append(f"{len(shown)} losses in place of {len(losses)}; there is none at {sorted(missing)[:5]}")
    for step, value in shown.items():
        result.values += 1
        if abs(value - float(losses[step])) > 1e-5 * (1 + abs(float(losses[step]))):
            result.wrong.append(f"loss {value} in place of {float(losses[step])} at step {step}")
            break
