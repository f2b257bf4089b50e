"""Rules find faults that are planted into real training runs, and find nothing in healthy ones."""

import statistics

import pytest

from tests.diagnosis import measure
from tests.diagnosis.healthy import HEALTHY, OTHERS
from tests.diagnosis.planted import FAULTS
from tests.diagnosis.training import Case, watch

FEW_FAULTS = [
    ("layer_not_in_optimizer", "mlp"),
    ("output_detached", "conv"),
    ("gradients_not_cleared", "recurrent"),
    ("dead_layer", "mlp"),
    ("softmax_before_cross_entropy", "conv"),
    ("sigmoid_before_binary_cross_entropy", "mlp"),
    ("group_without_rate", "mlp"),
    ("head_ignores_its_input", "transformer"),
    ("initial_weights_too_large", "recurrent"),
    ("gradients_cleared_before_the_step", "conv"),
    ("step_without_backward", "transformer"),
    ("loss_clamped_below_its_values", "mlp"),
    ("step_beside_the_scaler", "transformer"),
    ("clipped_with_the_factor_of_the_scaler", "mlp"),
    ("betas_exchanged", "mlp"),
    ("epsilon_of_another_optimizer", "mlp"),
]
FEW_HEALTHY = [
    ("plain", "mlp"),
    ("warm_restarts", "recurrent"),
    ("fine_tuning_with_a_frozen_half", "mlp"),
    ("sigmoid_and_binary_loss", "mlp"),
    ("scaled_and_clipped", "mlp"),
    ("evaluation_by_hand", "mlp"),
]


def findings_of(variation, family, seed=5, steps=70):
    case = Case(family, seed, steps)
    variation(case)
    return case, case.train(watch).findings


@pytest.mark.parametrize(("name", "family"), FEW_FAULTS)
def test_a_planted_fault_is_named(name, family):
    variation, rules, _ = FAULTS[name]
    case, findings = findings_of(variation, family)
    found = [finding for finding in findings if finding.rule in rules]
    assert found, f"found only {[str(finding) for finding in findings]}"
    if case.hit:
        names = [name for name, _ in case.model.named_modules()]
        assert 0 <= names.index(found[0].module) - names.index(case.hit) <= 2


def test_running_statistics_that_other_data_change_are_named():
    variation, _, _ = FAULTS["other_data_in_training_mode"]
    _, findings = findings_of(variation, "conv_norm", steps=131)
    assert [(f.rule, f.module) for f in findings if f.severity != "info"] == [("running_statistics", "norm0")]


@pytest.mark.parametrize(("name", "family"), FEW_HEALTHY)
def test_a_healthy_run_has_no_finding(name, family):
    _, findings = findings_of(HEALTHY[name][0], family)
    assert not [str(finding) for finding in findings if finding.severity != "info"]


def test_an_adversarial_pair_has_no_finding():
    findings = OTHERS["adversarial_generator_first"](5, watch).findings
    assert not [str(finding) for finding in findings if finding.severity != "info"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the findings of all faults and healthy runs, with seeds that no threshold was chosen by."""
    store = tmp_path_factory.mktemp("runs")
    specs = list(measure.specs(measure.SEEDS["report"]))
    return measure.judge([measure.replay(*measure.record(spec, store)) for spec in specs])


@pytest.mark.slow
def test_nine_of_ten_planted_faults_are_found(results):
    rows, _, _ = results
    entries = [entry for named in rows.values() for entry in named]
    assert len(FAULTS) >= 20
    assert statistics.mean(entry.is_found for entry in entries) >= 0.9


@pytest.mark.slow
def test_the_module_with_the_fault_is_named(results):
    """A NaN is the exception: the module is known only if the step in which it arose was sampled."""
    rows, _, _ = results
    near = [e.is_near for name, entries in rows.items() if name != "weight_becomes_nan" for e in entries]
    near = [is_near for is_near in near if is_near is not None]
    assert statistics.mean(near) >= 0.9


@pytest.mark.slow
def test_a_fault_is_found_within_thirty_samples(results):
    rows, _, _ = results
    steps = [e.announced for entries in rows.values() for e in entries if e.announced is not None]
    assert statistics.median(steps) <= 30 * 10


@pytest.mark.slow
def test_at_most_one_of_a_hundred_healthy_runs_has_a_finding(results):
    _, alarms, healthy = results
    assert healthy >= 150
    assert len(alarms) <= 0.01 * healthy, alarms
