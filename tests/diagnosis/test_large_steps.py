"""Steps that are too large are known by what they make of the weights, also if the loss comes back."""

import pytest

from ikkuna.diagnosis import Judge, Network, get_rules
from ikkuna.store.values import ModuleEntry
from tests.diagnosis.rows import NETWORK

USUAL = {"fc0": 10.0, "fc1": 10.0, "head": 10.0}  # 17.7 is the largest norm of a usual initialisation for each of them


def judged(rule, values, network=NETWORK, steps=60):
    """Return the findings of a rule; `values` are functions of the step by kind and module, sampled as a training is."""
    judge = Judge(get_rules([rule]), network)
    for step in range(0, steps, 2):
        for (kind, name), value in values.items():
            if kind == "loss" or step % 10 == 0:
                judge.add(kind, name, step, float(value(step)))
        judge.finish_step(step)
    return judge.findings


def too_high(start, end, first_step=0.2, loss=lambda step: 2.3):
    """Return the findings for weights that go from one norm to another in the first ten steps."""
    ratio = {("weight_updates_weights_ratio", n): lambda step: 0.01 if step else first_step for n in start}
    norms = {("weights_norm2", n): lambda step, n=n: end[n] if step else start[n] for n in start}
    return judged("lr_too_high", norms | ratio | ({("loss", None): loss} if loss else {}))


def test_steps_after_which_weights_are_larger_than_any_initialisation_are_too_large():
    (found,) = too_high(USUAL, {"fc0": 30.0, "fc1": 30.0, "head": 10.0})
    assert found.rule == "lr_too_high"
    assert "larger weights than any usual initialisation" in found.message


@pytest.mark.parametrize(
    "run",
    [
        {"start": USUAL, "end": {"fc0": 30.0, "fc1": 10.0, "head": 10.0}},  # one layer of three
        {"start": USUAL, "end": {"fc0": 17.0, "fc1": 17.0, "head": 17.0}},
        {"start": dict.fromkeys(USUAL, 20.0), "end": dict.fromkeys(USUAL, 30.0)},  # they began large
        {"start": dict.fromkeys(USUAL, 20.0), "end": dict.fromkeys(USUAL, 0.0)},
        {"start": USUAL, "end": dict.fromkeys(USUAL, 30.0), "first_step": 0.05},
        {"start": USUAL, "end": dict.fromkeys(USUAL, 30.0), "loss": None},  # what the steps are for is not known
        {"start": USUAL, "end": dict.fromkeys(USUAL, 30.0), "loss": lambda step: 2.3 if step < 6 else 1.0},
    ],
)
def test_steps_that_leave_most_weights_in_a_usual_range_or_fit_the_task_are_right(run):
    assert not too_high(**run)


def test_weights_that_begin_at_zero_do_not_count_as_moved():
    """Adapters begin with a factor of zero, of which the first steps are a large part."""
    ratios = {"fc0": lambda step: 0.01, "fc1": lambda step: 0.8, "head": lambda step: 0.7}
    norms = {"fc0": lambda step: 10.0, "fc1": lambda step: 0.01 * step, "head": lambda step: 0.01 * step}
    values = {
        **{("weight_updates_weights_ratio", name): ratio for name, ratio in ratios.items()},
        **{("weights_norm2", name): norm for name, norm in norms.items()},
        ("loss", None): lambda step: 0.3 + 0.02 * step,
    }
    assert not judged("lr_too_high", values)
    assert judged("lr_too_high", values | {("weights_norm2", name): lambda step: 10.0 for name in norms})


NORMALISED = Network(
    [
        *(ModuleEntry(f"conv{i}", "Conv2d", (("weight", (20, 20, 3, 3)),)) for i in range(2)),
        ModuleEntry("norm", "BatchNorm2d", (("weight", (20,)),)),
        ModuleEntry("head", "Linear", (("weight", (10, 20)),)),
    ]
)


@pytest.mark.parametrize(("rates", "is_found"), [((1e-3, 0.3), True), ((1e-3, 1e-2), False), ((0.1, 0.1), False)])
def test_a_first_step_before_a_normalisation_is_large_if_its_group_is_much_faster(rates, is_found):
    moved = {"conv0": 0.01, "conv1": 5.0, "head": 0.02}
    values = {("weight_updates_weights_ratio", n): lambda step, v=v: 0.01 if step else v for n, v in moved.items()}
    values |= {("weights_norm2", name): lambda step: 3.0 for name in moved}
    values |= {("learning_rate", f"group{i}"): lambda step, rate=rate: rate for i, rate in enumerate(rates)}
    assert [finding.module for finding in judged("update_ratio", values, NORMALISED)] == ["conv1"] * is_found


@pytest.mark.parametrize(("size", "is_found"), [(0.05, False), (3.0, True)])
def test_a_step_that_is_far_only_for_a_layer_that_begins_small_is_none(size, is_found):
    """As the last layer of a policy, initialised with a gain of 0.01."""
    moved = {"conv0": 0.01, "conv1": 0.01, "head": 1.5}
    values = {("weight_updates_weights_ratio", n): lambda step, v=v: 0.01 if step else v for n, v in moved.items()}
    values |= {("weights_norm2", f"conv{i}"): lambda step: 3.0 * 3600**0.5 / 200**0.5 for i in range(2)}
    values |= {("weights_norm2", "head"): lambda step: 3.0 if step else size}
    assert [finding.module for finding in judged("update_ratio", values, NORMALISED)] == ["head"] * is_found
