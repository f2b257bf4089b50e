"""Faults that begin after step 300, when rules sample less often: ``python -m tests.diagnosis.late [family …]``.

It prints for each fault the steps from its beginning to the finding, with samples at every 40th step, as by default, and at every tenth.
Healthy runs of the same length follow.
"""

import logging
import math
import sys
from functools import partial

import torch
from torch import nn

from tests.diagnosis.healthy import HEALTHY
from tests.diagnosis.training import Case, watch

BEGIN, STEPS = 353, 700
EVERY = 10
HEALTHY_NAMES = ("plain", "warmup_and_cosine", "warm_restarts", "dropout", "decay_by_steps", "memorising")


def gradients_not_cleared(case, optimizer):
    case.clears = False


def dead_layer(case, optimizer):
    nn.init.constant_(case.model.get_submodule(case.hit).bias, -60.0)


def rate_far_too_high(case, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 100


def rate_vanishes(case, optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= 1e-9


def weight_becomes_nan(case, optimizer):
    case.model.get_submodule(case.hit).weight.data.view(-1)[0] = math.nan


def evaluation_mode(case, optimizer):
    case.model.eval()


def output_on_a_line(case, optimizer):
    layer = case.model.get_submodule(case.hit)
    direction = nn.functional.normalize(torch.randn(len(layer.bias)), dim=0)
    layer.register_forward_hook(lambda module, args, out: (out @ direction)[..., None] * direction)


LATE = {
    gradients_not_cleared: {"not_zeroed"},
    dead_layer: {"dead_units", "zero_gradient"},
    rate_far_too_high: {"lr_too_high", "diverges", "nonfinite", "loss_spike", "gradient_spike"},
    rate_vanishes: {"lr_vanished"},
    weight_becomes_nan: {"nonfinite"},
    evaluation_mode: {"evaluation_mode"},
    output_on_a_line: {"rank_collapse", "signal_lost", "ignores_input"},
}
"""Function of a case and its optimizer, called once, and the rules that may name it."""


def delay(fault, family, later, seed=1, begin=BEGIN, steps=STEPS):
    """Return the rule that names a fault, and the number of steps until its finding."""
    case, announced = Case(family, seed, steps), {}
    case.dropout, case.prepare = 0.1, [lambda case: case.pick()]
    case.on_step.append(lambda case, step, optimizer: fault(case, optimizer) if step == begin else None)

    def note(finding):
        announced.setdefault(finding.rule, max(exporters[0].steps_seen(), finding.step))

    exporters = []

    def observe(model, loss):
        exporter = watch(model, loss, every=EVERY, later=later, on_finding=note)
        exporter.steps_seen = lambda: exporter._attachment.rules.judge.history.step
        exporters.append(exporter)
        return exporter

    case.train(observe)
    named = {rule: step for rule, step in announced.items() if rule in LATE[fault] and step >= begin}
    rule = min(named, key=named.get, default=None)
    return rule, named[rule] - begin if rule else None


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(*families):
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    say("| fault | family | rule | steps to the finding | with samples at every tenth step |\n|---|---|---|---|---|")
    for family in families or ("mlp", "transformer"):
        for fault in LATE:
            (rule, default), (_, dense) = (delay(fault, family, later) for later in (4 * EVERY, EVERY))
            say(f"| {fault.__name__} | {family} | {rule} | {default} | {dense} |")
    for family in families or ("mlp", "transformer"):
        for name in HEALTHY_NAMES:
            case = Case(family, 1, STEPS)
            if name in HEALTHY and family in HEALTHY[name][1]:
                HEALTHY[name][0](case)
                loud = [f.rule for f in case.train(partial(watch)).findings if f.severity != "info"]
                say(f"healthy {name} {family}: {loud}")


if __name__ == "__main__":
    main(*sys.argv[1:])
