"""Judges planted faults with torchmortem and with ikkuna's rules: ``python -m tests.diagnosis.peer SEED [SEED …]``.

Each fault and each healthy variation is run once for each seed, in a family of networks that is drawn at random.
torchmortem is no requirement of the tests; unpack it anywhere and add it to ``PYTHONPATH``: ``pip download --no-deps torchmortem==0.1.1``.
Its own collectors attach to the model, as its documentation shows, and its own detectors judge what they collected, in every step.
Both see the same runs: model, data, seed and fault.  A finding of the severity WARNING or CRITICAL is an alarm.
"""

import importlib
import logging
import pickle
import random
import sys
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.diagnosis import measure
from tests.diagnosis.healthy import HEALTHY, OTHERS
from tests.diagnosis.planted import FAULTS
from tests.diagnosis.training import Case

DIVERGES = {"loss_dynamics", "gradient_flow", "weight_norm", "update_ratio"}
STALLS = {"loss_dynamics", "gradient_flow", "update_ratio"}
LOST = {"gradient_flow", "saturation", "dead_units", "rank_collapse", "loss_dynamics"}

# fault → the categories of torchmortem that describe it, chosen in its favour; the others have no category.
CATEGORIES = {
    **dict.fromkeys(
        ["rate_far_too_high", "loss_with_the_wrong_sign", "weight_decay_too_high", "one_huge_step"], DIVERGES
    ),
    **dict.fromkeys(["weight_becomes_nan", "initial_weights_too_large", "gradients_not_cleared"], DIVERGES),
    **dict.fromkeys(["loss_is_a_sum", "one_group_far_too_fast", "inputs_not_normalised"], DIVERGES),
    **dict.fromkeys(["rate_far_too_low", "group_without_rate", "weights_in_bfloat16", "schedule_in_batches"], STALLS),
    **dict.fromkeys(["layer_not_in_optimizer", "layer_frozen_by_mistake", "output_detached"], STALLS),
    **dict.fromkeys(["clipping_far_too_low", "softmax_before_cross_entropy", "labels_shuffled"], STALLS),
    **dict.fromkeys(["dead_layer", "output_times_zero", "head_ignores_its_input", "initial_weights_too_small"], LOST),
    **dict.fromkeys(["sigmoids_in_many_layers", "saturated_layer", "weights_of_classes_wrong"], LOST),
}


class Watched:
    """Calls torchmortem as a training script does; has the methods of an exporter that the runs call."""

    def __init__(self, model, loss, optimizer=None):
        autopsy = importlib.import_module("torchmortem").Autopsy
        self.model, self.seen, self.handles = model, [], []
        if isinstance(loss, nn.Module):
            self.handles.append(loss.register_forward_hook(lambda module, args, output: self.seen.append(output)))
        self.handles.append(register_optimizer_step_post_hook(self._end_step))
        self.autopsy = autopsy(model, optimizer)
        self.autopsy.attach()

    def _end_step(self, optimizer, args, kwargs):
        owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p) in owned for p in self.model.parameters()):
            values = {"loss": float(sum(self.seen).detach())} if self.seen else {}
            self.seen.clear()
            self.autopsy.step(**values)

    def epoch_finished(self):
        pass

    def evaluate(self, batches, pass_name):
        pass

    def close(self):
        for handle in self.handles:
            handle.remove()
        self.autopsy.detach()

    def alarms(self):
        """Return the categories of the findings that are at least warnings."""
        return {finding.category for finding in self.autopsy.get_report().findings if finding.severity.name != "INFO"}


def judge(spec):
    """Return the categories that torchmortem reports for one run; ``None`` if it raises into the training loop."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    file = measure.STORE / f"{'.'.join(map(str, spec))}.torchmortem"
    if file.exists():
        return pickle.loads(file.read_bytes())
    name, family, seed = spec
    try:
        if family == "other":
            found = OTHERS[name](seed, Watched).alarms()
        else:
            found = _train(Case(family, seed), (FAULTS.get(name) or HEALTHY[name])[0]).alarms()
    except (TypeError, ValueError, RuntimeError, FloatingPointError):
        found = None
    file.write_bytes(pickle.dumps(found))
    return found


def _train(case, variation):
    variation(case)
    create, created = case.optimizer, []

    def optimizer():
        created.append(create())
        return created[-1]

    case.optimizer = optimizer
    return case.train(lambda model, loss: Watched(model, loss, created[0]))


def ours(spec):
    """Return the rules that ikkuna reports for one run: those expected for the fault, and all."""
    _, findings, *_ = measure.replay(*measure.record(spec))
    expected = FAULTS[spec[0]][1] if spec[0] in FAULTS else frozenset()
    loud = {f.rule for f in findings if f.severity != "info"}
    named = any(f.rule in expected or expected.intersection(f.consequences) for f in findings)
    return loud, named


def drawn(seed):
    """Return (name, family, seed) of one run for each fault and each healthy variation."""
    names = {}
    for spec in measure.specs([seed]):
        names.setdefault(spec[0], []).append(spec)
    return [random.Random(f"{name} {seed}").choice(specs) for name, specs in names.items()]


def main(*seeds):
    specs = [spec for seed in seeds for spec in drawn(int(seed))]
    measure.STORE.mkdir(exist_ok=True)
    with ProcessPoolExecutor(2) as pool:
        theirs = dict(zip(specs, pool.map(judge, specs, chunksize=4), strict=True))
        mine = dict(zip(specs, pool.map(ours, specs, chunksize=4), strict=True))
    say, faulty = measure.say, [spec for spec in specs if spec[0] in FAULTS]
    healthy = [spec for spec in specs if spec[0] not in FAULTS]
    say("| fault | runs | ikkuna names it | torchmortem names it | torchmortem has any alarm |\n|---|---|---|---|---|")
    for name in sorted(FAULTS):
        runs = [spec for spec in faulty if spec[0] == name]
        fits = CATEGORIES.get(name, set())
        named = sum(bool(fits & (theirs[spec] or set())) for spec in runs)
        loud = sum(bool(theirs[spec]) for spec in runs)
        say(f"| {name} | {len(runs)} | {sum(mine[s][1] for s in runs)} | {named if fits else '–'} | {loud} |")
    named = [s for s in faulty if CATEGORIES.get(s[0], set()) & (theirs[s] or set())]
    _summary("ikkuna", [s for s in faulty if mine[s][1]], [s for s in healthy if mine[s][0]], faulty, healthy)
    _summary("torchmortem", named, [s for s in healthy if theirs[s]], faulty, healthy)
    say(f"torchmortem raised into the loop: {sum(found is None for found in theirs.values())} runs")
    say(f"alarms in healthy runs: {Counter(category for s in healthy for category in theirs[s] or ())}")


def _summary(name, named, alarmed, faulty, healthy):
    recall, precision = len(named) / len(faulty), len(named) / max(len(named) + len(alarmed), 1)
    measure.say(
        f"{name}: recall {len(named)} of {len(faulty)} ({recall:.0%}), alarms in {len(alarmed)} of {len(healthy)} healthy runs, "
        f"precision {precision:.0%}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
